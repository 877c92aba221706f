"""Hang reports: what each process was doing when none makes progress, and which one the others wait for.

A report contains the stacks of the threads, the kernel's view of the process, and the collectives it has begun and not
finished, as torch's flight recorder has them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pipeline.system.torch_private import flight_recorder_dumps
from train.process_group import PHASES, Phase

_SAME_START_SECONDS = 1.0  # the kernel counts from boot, whose time depends on the clock
_KERNEL_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits in the kernel for a disk or a device",
    "Z": "it has ended",
}
_HANG_SHARE = 0.8  # of the timeout: reports of other processes are a little old
_COLLECTIVES = ("/torch/distributed/", "/horovod/torch/")
_TRAIN_FOLDER = Path(__file__).parent
_ADVICE = "If this only takes long, raise train.timeout_seconds; else fix the cause, then: pipe run --resume"
MISMATCH_ADVICE = (
    "To fix it: let every process call the same ones in the same order, with tensors of the same shape; conditions "
    "such as `if rank == 0` do not suit them"
)
_RECORDED_COLLECTIVES = 64
_REPORTED_COLLECTIVES = 3


class Activity(IntEnum):
    """What the main thread is doing; the lower, the more likely the others wait for this process."""

    USER_CODE = 0
    PIPE_CODE = 1
    WAITING = 2  # in a collective, or in the backward pass, where gradients are exchanged


@dataclass(frozen=True)
class ProcessReport:
    """What one process reports about itself."""

    rank: int
    host: str
    pid: int
    started: float  # start time of the process; a pid can be reused
    beat: int  # grows with every report
    step: int  # under way, or just done; numbered from 1, as in metrics.jsonl
    phase: Phase
    activity: Activity
    place: str  # in the source
    still_seconds: float  # without moving
    exchanges: str = ""  # unfinished collectives; only while it hangs
    stacks: str = ""  # only while it hangs
    calls: Mapping[str, str] = field(default_factory=dict)  # the collectives by group and number, to be compared


@dataclass(frozen=True)
class Hang:
    reports: Sequence[ProcessReport]
    culprits: Sequence[ProcessReport]  # empty: all wait for each other
    silent: Mapping[int, str] = field(default_factory=dict)  # by rank: why it does not report, as far as known


def culprits(reports: Sequence[ProcessReport], silent: Collection[int], timeout_seconds: float) -> list[ProcessReport]:
    """Return the processes that the others wait for: the silent ones, else those furthest behind.

    None while any makes progress, and none where all are at the same place: that may be long work of all.
    """
    if _any_progress(reports, silent, timeout_seconds):
        return []
    if silent:
        return [report for report in reports if report.rank in silent]
    keys = [(report.activity, report.step, PHASES.index(report.phase)) for report in reports]
    furthest_behind = [report for report, key in zip(reports, keys, strict=True) if key == min(keys)]
    return furthest_behind if len(furthest_behind) < len(reports) else []


def is_network_cut(reports: Sequence[ProcessReport], timeout_seconds: float) -> bool:
    """Return whether all wait in a collective, so that data sent by one does not reach another."""
    if _any_progress(reports, (), timeout_seconds):
        return False
    return all(report.activity is Activity.WAITING and report.exchanges for report in reports)


def is_mismatch(hang: Hang) -> bool:
    """Return whether processes have begun different collectives under one number, so that none can end."""
    if hang.culprits:
        return False
    calls: dict[str, str] = {}
    return any(
        calls.setdefault(number, call) != call for report in hang.reports for number, call in report.calls.items()
    )


def describe_hang(hang: Hang) -> str:
    """Describe which process the others wait for, where it is, and where they wait."""
    if is_mismatch(hang):
        return f"the processes call different collectives: {_describe_positions(hang.reports)}. {MISMATCH_ADVICE}"
    if not hang.culprits:
        return f"{_describe_network_cut(hang.reports)}. {_ADVICE}"
    culprit_text = "; ".join(_describe_culprit(report, hang.silent) for report in hang.culprits)
    others = [report for report in hang.reports if report not in hang.culprits]
    return f"{culprit_text}. Waiting for it: {_describe_positions(others)}. {_ADVICE}"


def locate(frame: FrameType | None, root: Path) -> tuple[Activity, str]:
    """Find what a thread is doing: the innermost frame of user code or of waiting, else the innermost of `train`."""
    innermost, train_location = _describe_frame(frame) if frame is not None else "", ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return Activity.USER_CODE, _describe_frame(frame)
        if any(library in path.as_posix() for library in _COLLECTIVES):
            return Activity.WAITING, f"the collective {frame.f_code.co_name}"
        if "/torch/autograd/" in path.as_posix():
            return Activity.WAITING, "the backward pass"
        if not train_location and path.is_relative_to(_TRAIN_FOLDER):
            train_location = _describe_frame(frame)
        frame = frame.f_back
    return Activity.PIPE_CODE, train_location or innermost


def is_checkpointing(frame: FrameType | None) -> bool:
    """Return whether a thread writes a checkpoint, or takes part in its collectives."""
    while frame is not None:
        if "/train/checkpoint/" in Path(frame.f_code.co_filename).as_posix():
            return True
        frame = frame.f_back
    return False


def _any_progress(reports: Sequence[ProcessReport], silent: Collection[int], timeout_seconds: float) -> bool:
    return any(report.still_seconds < _HANG_SHARE * timeout_seconds for report in reports if report.rank not in silent)


def _describe_culprit(report: ProcessReport, silent: Mapping[int, str]) -> str:
    process = f"rank {report.rank} on {report.host} (process {report.pid})"
    if report.rank in silent:
        reason = silent[report.rank] or "stopped, stuck in native code, or its machine is gone"
        return f"{process} does not answer: {reason}; last seen at {_describe_position(report)}"
    return f"{process} has made no progress for {report.still_seconds:.0f} s from {_describe_position(report)}"


def _describe_network_cut(reports: Sequence[ProcessReport]) -> str:
    still_seconds, hosts = min(report.still_seconds for report in reports), sorted({report.host for report in reports})
    positions = _describe_positions(reports)
    return (
        f"all {len(reports)} processes have waited for each other for {still_seconds:.0f} s: {positions}; "
        f"the network between them is cut or too slow ({', '.join(hosts)})"
    )


def _describe_positions(reports: Sequence[ProcessReport]) -> str:
    ordered_reports = sorted(reports, key=_describe_position)
    return "; ".join(
        f"rank {', '.join(str(report.rank) for report in group)} at {place}"
        for place, group in itertools.groupby(ordered_reports, key=_describe_position)
    )


def _describe_position(report: ProcessReport) -> str:
    details = "; ".join(text for text in (report.place, report.exchanges) if text)
    return f"step {report.step}, {report.phase}" + (f" ({details})" if details else "")


def _describe_frame(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, {frame.f_code.co_name}"


class StackDump:
    """Writes the stacks of this process to `path` unless rearmed in time, even if the interpreter is blocked."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._file = path.open("w")

    def rearm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if os.fstat(self._file.fileno()).st_size:  # the process was blocked and continues
            self._file.seek(0)
            self._file.truncate()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def remove(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        self._path.unlink()


def thread_stacks() -> str:
    """Return the stacks of all threads except the calling one; the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own_thread = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(number, number)}, innermost call last:\n" + "".join(traceback.format_stack(frame))
        for number, frame in frames
        if number != own_thread
    )


def silence_reason(pid: int, started: float) -> str:
    """Return why a process of this machine does not report, as far as the kernel knows; a pid can be reused."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if abs(psutil.Process(pid).create_time() - started) < _SAME_START_SECONDS:
            return _KERNEL_STATES.get(kernel_state(pid)[:1], "its interpreter is blocked in native code")
    return "it has ended"


def kernel_state(pid: int) -> str:
    """Return such as `T (stopped), in do_signal_stop`, and the kernel's stack where it is readable."""
    folder, state = Path("/proc", str(pid)), ""
    with contextlib.suppress(OSError):
        lines = (folder / "status").read_text().splitlines()
        state = next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
        state += f", in {(folder / 'wchan').read_text()}"
        state += "\n" + (folder / "stack").read_text().rstrip()
    return state


def process_start() -> float:
    """Return the start time; with the pid it identifies this process."""
    return float(psutil.Process().create_time())


def enable_flight_recorder() -> None:
    """Switch torch's flight recorders on, before the first collective; their cost is too small to measure."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # without it, NCCL's does not know what has started


def unfinished_collectives() -> list[dict[str, Any]]:
    """Return the entries of the flight recorders; NCCL has its own, which retires a completed one a little later."""
    entries = [entry for dump in flight_recorder_dumps() for entry in json.loads(dump).get("entries", [])]
    return [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]


def waits_on_gpu(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the GPU is within a collective of NCCL.

    The host has gone on since, and waits wherever it needs a result: in `.item()`, or `synchronize()`.
    """
    return any(entry["profiling_name"].startswith("nccl:") and entry["state"] == "started" for entry in entries)


def numbered_calls(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the collectives by process group and number; those of one number must be equal in all processes."""
    calls = {}
    for entry in entries:
        if not entry["is_p2p"]:
            name = entry["profiling_name"]
            sizes = f" of {entry['input_sizes']}" if name.endswith(":all_reduce") else ""  # others may differ
            calls[f"{entry['process_group'][0]} no. {entry['collective_seq_id']}"] = name + sizes
    return calls


def describe_collectives(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return such as `gloo:all_reduce, no. 12, of [151498] Float`; empty without any."""
    return "; ".join(map(describe_collective, entries[-_REPORTED_COLLECTIVES:]))


def describe_collective(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors = [f"{shape} {dtype}" for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)]
    return f"{entry['profiling_name']}, no. {number}, of {' and '.join(tensors) or 'nothing'}"
