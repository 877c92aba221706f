"""When no process moves any more: which one the others wait for, and how that is told.

What can be learned of a process that stands still: its stacks, what the kernel says of it; and its end.

The exchanges this process has begun and not finished, as torch's flight recorder has them.
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
from torch._C import _distributed_c10d as c10d

from train.process_group import PHASES, Phase

_SAME_START_SECONDS = 1.0  # the kernel counts from boot, and when that was is a matter of the clock
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is held by a debugger",
    "D": "it waits in the kernel for a disk or a device",
    "Z": "it has ended",
}


class Tripwire:
    """The stacks of this process, written to `path` when nobody rearms: no interpreter is needed for that."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._file = path.open("w")

    def rearm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if os.fstat(self._file.fileno()).st_size:  # what was blocked has gone on
            self._file.seek(0)
            self._file.truncate()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def remove(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        self._path.unlink()


def stacks() -> str:
    """Of all threads of this process but the one that asks; the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(number, number)}, innermost call last:\n" + "".join(traceback.format_stack(frame))
        for number, frame in frames
        if number != own
    )


def why_silent(pid: int, started: float) -> str:
    """Why a process of this machine says nothing, as far as its kernel tells."""
    if _find(pid, started) is None:
        return "it has ended"
    return _STATES.get(kernel_state(pid)[:1], "its interpreter is blocked in native code")


def kernel_state(pid: int) -> str:
    """Such as `T (stopped), in do_signal_stop`, and where it may be read the kernel's own stack."""
    place, told = Path("/proc", str(pid)), ""
    with contextlib.suppress(OSError):
        lines = (place / "status").read_text().splitlines()
        told = next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
        told += f", in {(place / 'wchan').read_text()}"
        told += "\n" + (place / "stack").read_text().rstrip()
    return told


def put_down(pid: int, started: float) -> None:
    """SIGKILL for a process of this machine that answers nobody: its launcher would wait for it."""
    if (process := _find(pid, started)) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def process_start() -> float:
    """Together with its pid it tells this process from any other one."""
    return float(psutil.Process().create_time())


def _find(pid: int, started: float) -> psutil.Process | None:
    """None when the pid is free, or another process's by now."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < _SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return None
    return process if same else None


_NEARLY = 0.8  # what others tell of themselves is a little old
_COLLECTIVES = ("/torch/distributed/", "/horovod/torch/")
_OURS = Path(__file__).parent
_KEEPERS = ("/train/checkpoint/", "/train/snapshot/")
_MEND = "Where it only takes long, raise train.timeout_seconds; else mend it and `pipe run --resume`"


class Doing(IntEnum):
    """What the main thread is at; the less it looks like waiting for others, the sooner it is the one they wait for."""

    USERS_CODE = 0
    OUR_CODE = 1
    WAITING = 2  # in a collective, or in the backward pass, where gradients are exchanged


@dataclass(frozen=True)
class Report:
    """What one process tells of itself."""

    rank: int
    host: str
    pid: int
    started: float  # when the process did; the pid alone may be another's by now
    beat: int  # grows with every report
    step: int
    phase: Phase
    doing: Doing
    place: str  # in the source
    still_seconds: float  # without moving
    exchanges: str = ""  # that it has not finished; told when it stands still
    stacks: str = ""  # likewise


@dataclass(frozen=True)
class Standstill:
    reports: Sequence[Report]
    culprits: Sequence[Report]  # none: all wait for each other
    silent: Mapping[int, str] = field(default_factory=dict)  # by rank: why it says nothing, as far as that is known


def culprits(reports: Sequence[Report], silent: Collection[int], timeout_seconds: float) -> list[Report]:
    """Those the others wait for: the silent ones, else those furthest behind.

    Nobody while somebody moves, and nobody where all stand at the same place: that may be long work of all.
    """
    if _somebody_moves(reports, silent, timeout_seconds):
        return []
    keys = [(one.rank not in silent, one.doing, one.step, PHASES.index(one.phase)) for one in reports]
    if silent:
        return [one for one in reports if one.rank in silent]
    found = [one for one, key in zip(reports, keys, strict=True) if key == min(keys)]
    return found if len(found) < len(reports) else []


def cut_off(reports: Sequence[Report], timeout_seconds: float) -> bool:
    """Whether all wait in an exchange that goes on nowhere: what one has sent does not reach another."""
    if _somebody_moves(reports, (), timeout_seconds):
        return False
    return all(one.doing is Doing.WAITING and one.exchanges for one in reports)


def sentence(found: Standstill) -> str:
    """Who is waited for, where, and where the others wait."""
    if not found.culprits:
        return f"{_all_wait(found.reports)}. {_MEND}"
    blamed = "; ".join(_blame(one, found.silent) for one in found.culprits)
    others = [one for one in found.reports if one not in found.culprits]
    return f"{blamed}. Waiting for it: {_waiting(others)}. {_MEND}"


def locate(frame: FrameType | None, root: Path) -> tuple[Doing, str]:
    """What a thread is at: the innermost frame that is the user's, or waits for others; else the innermost of ours."""
    innermost, ours = _name(frame) if frame is not None else "", ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return Doing.USERS_CODE, _name(frame)
        if any(library in path.as_posix() for library in _COLLECTIVES):
            return Doing.WAITING, f"the collective {frame.f_code.co_name}"
        if "/torch/autograd/" in path.as_posix():
            return Doing.WAITING, "the backward pass"
        if not ours and path.is_relative_to(_OURS):
            ours = _name(frame)
        frame = frame.f_back
    return Doing.OUR_CODE, ours or innermost


def keeps_state(frame: FrameType | None) -> bool:
    """Whether a thread writes a checkpoint or a snapshot, or exchanges what that takes."""
    while frame is not None:
        if any(package in Path(frame.f_code.co_filename).as_posix() for package in _KEEPERS):
            return True
        frame = frame.f_back
    return False


def _somebody_moves(reports: Sequence[Report], silent: Collection[int], timeout_seconds: float) -> bool:
    return any(one.still_seconds < _NEARLY * timeout_seconds for one in reports if one.rank not in silent)


def _blame(one: Report, silent: Mapping[int, str]) -> str:
    who = f"rank {one.rank} on {one.host} (process {one.pid})"
    if one.rank in silent:
        why = silent[one.rank] or "stopped, stuck in native code, or its machine is gone"
        return f"{who} does not answer: {why}; last seen at {_where(one)}"
    return f"{who} has not moved for {one.still_seconds:.0f} s from {_where(one)}"


def _all_wait(reports: Sequence[Report]) -> str:
    still, hosts = min(one.still_seconds for one in reports), sorted({one.host for one in reports})
    return (
        f"all {len(reports)} processes have waited for each other for {still:.0f} s: {_waiting(reports)}; "
        f"the network between them is cut or too slow ({', '.join(hosts)})"
    )


def _waiting(reports: Sequence[Report]) -> str:
    ordered = sorted(reports, key=_where)
    return "; ".join(
        f"rank {', '.join(str(one.rank) for one in group)} at {where}"
        for where, group in itertools.groupby(ordered, key=_where)
    )


def _where(one: Report) -> str:
    inside = "; ".join(told for told in (one.place, one.exchanges) if told)
    return f"step {one.step}, {one.phase}" + (f" ({inside})" if inside else "")


def _name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, {frame.f_code.co_name}"


_KEPT = 64  # the newest exchanges
_TOLD = 3


def record_exchanges() -> None:
    """Before the first one: torch looks once. The recording itself is lost in the noise of an exchange over gloo."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_KEPT))


def unfinished() -> str:
    """Such as `gloo:all_reduce, no. 12, of [151498] Float`; nothing where the recorder knows of none."""
    recorder: Any = c10d  # published without types
    body = json.loads(recorder._dump_fr_trace_json(True, False))
    open_ones = [entry for entry in body.get("entries", []) if not entry["retired"]]
    return "; ".join(map(describe, open_ones[-_TOLD:]))


def describe(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors = [f"{shape} {kind}" for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)]
    return f"{entry['profiling_name']}, no. {number}, of {' and '.join(tensors) or 'nothing'}"
