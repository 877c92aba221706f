"""Profile training (`trace: true`): a few steps of all processes as one file for Perfetto or chrome://tracing.

The timelines of the processes are merged into one file, which also gives the share of communication that computation
did not hide. `phase` names stretches of a step in the timeline.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.system.files import write_atomic, write_json
from pipeline.system.torch_private import is_profiling
from train.process_group import ProcessGroup

TRACE_FILE = "trace.json.gz"
SHARES_FILE = "communication.json"
_CLOCK_SAMPLES = 5


class StepTracer:
    """Records some steps; the profiler warms up for one step before."""

    def __init__(self, steps: range, group: ProcessGroup, directory: Path) -> None:
        self._steps, self._group, self._directory = steps, group, directory
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Prepare for global step `step`; all processes call this for the same steps."""
        if self._steps and step == self._steps.start - 1:
            self._profiler = _profiler(self._group.device, len(self._steps))
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
            if step == self._steps.stop:
                self._finish(self._profiler)

    def end(self, step: int) -> None:
        """Finish when training has ended after `step` steps."""
        self.before(step)
        if self._profiler is not None:
            self._profiler.stop()
        if self._group.rank.first and not (self._directory / TRACE_FILE).exists():
            print(f"no timeline: training ended after {step} steps, before those to be traced", flush=True)

    def _finish(self, profiler: profile) -> None:
        self._profiler = None
        profiler.stop()
        body = gzip.compress(json.dumps(_export(profiler)).encode(), compresslevel=1)
        parts = self._group.collect((socket.gethostname(), self._sample_clocks(), body))
        if self._group.rank.first:
            self._write([Timeline(host, clocks, *json.loads(gzip.decompress(part))) for host, clocks, part in parts])

    def _write(self, timelines: list[Timeline]) -> None:
        events = merge_timelines(timelines, self._steps.start - 1)  # the profiler also counts its warm-up step
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
        write_atomic(self._directory / TRACE_FILE, gzip.compress(text.encode(), mtime=0))
        traced = {"first_step": self._steps.start, "steps": len(self._steps)}
        write_json(self._directory / SHARES_FILE, {**traced, **communication_shares(events)})
        print(
            f"timeline of steps {self._steps.start} to {self._steps.stop - 1}: train/{TRACE_FILE} of the run",
            flush=True,
        )

    def _sample_clocks(self) -> tuple[int, ...]:
        """Return the times, by this process's clock, at which a collective ends on all processes."""
        moments = []
        for _ in range(_CLOCK_SAMPLES):
            self._group.total([0.0])
            moments.append(time.time_ns())
        return tuple(moments)


FIRST_TRACED_STEP, TRACED_STEPS = 3, 5


def traced_steps(first: int, count: int, start: int, total: int) -> range:
    """Return the steps to trace, counted from where this process starts; earlier if training ends before."""
    count = min(count, max(0, total - start - 1))  # one step is for the warm-up
    begin = max(start + 1, min(start + first, total - count))
    return range(begin, begin + count)


def _profiler(device: torch.device, steps: int) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), acc_events=True)


def _export(profiler: profile) -> tuple[int, list[Event]]:
    """Return the origin of the events' times, and the events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        body: dict[str, Any] = json.loads(path.read_text())
    return body.get("baseTimeNanoseconds", 0), body["traceEvents"]


Event: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[float, float]

_STEP = re.compile(r"ProfilerStep#(\d+)")
_EXCHANGE = re.compile(r"(gloo|nccl|mpi):|ncclDevKernel|ncclKernel")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Timeline:
    """The events of one process, as its profiler wrote them."""

    host: str
    moments_ns: tuple[int, ...]  # its clock at the end of each common collective
    base_ns: int  # origin of the events' times
    events: Sequence[Event]


def merge_timelines(timelines: Sequence[Timeline], first_step: int) -> list[Event]:
    """Merge into one lane per process; times are microseconds of the first process's clock, from the first event."""
    shifts = clock_offsets_ns(timelines)
    events: list[Event] = []
    for rank, (timeline, offset_ns) in enumerate(zip(timelines, shifts, strict=True)):
        offset_us = (timeline.base_ns - timelines[0].base_ns + offset_ns) / 1e3
        events += [
            _place_in_lane(event, rank, offset_us, first_step) for event in timeline.events if _is_relevant(event)
        ]
    start = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    for event in events:
        event["ts"] = round(max(0.0, event["ts"] - start), 3)
    names = [_lane(rank, f"rank {rank} ({timeline.host})") for rank, timeline in enumerate(timelines)]
    return [entry for lane in names for entry in lane] + events


def clock_offsets_ns(timelines: Sequence[Timeline]) -> list[int]:
    """Return what to add to each process's clock; processes of one machine share a clock."""
    first_timeline = timelines[0]
    return [
        0
        if timeline.host == first_timeline.host
        else round(
            statistics.median(a - b for a, b in zip(first_timeline.moments_ns, timeline.moments_ns, strict=True))
        )
        for timeline in timelines
    ]


def communication_shares(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return by lane in which share of the steps' time communication was in progress, and was not hidden.

    It is exposed while the process computes nothing; where a process used a GPU, its kernels count.
    """
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            by_rank.setdefault(event["pid"], []).append(event)
    return {f"rank {rank}": _lane_shares(by_rank[rank]) for rank in sorted(by_rank)}


def uncovered_length(spans: Iterable[Span], cover: Iterable[Span]) -> float:
    """Return the length of the union of `spans` outside the union of `cover`."""
    return union_length([*spans, *(cover := list(cover))]) - union_length(cover)


def union_length(spans: Iterable[Span]) -> float:
    """Return the length of the union of `spans`."""
    total, covered_until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return total


def _lane_shares(events: Sequence[Event]) -> dict[str, float]:
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    exchange, compute, steps = list[Span](), list[Span](), list[Span]()
    for event in events:
        span = (event["ts"], event["ts"] + event["dur"])
        if event["name"].startswith("step "):
            steps.append(span)
        elif on_gpu and event.get("cat") in _ON_GPU:
            (exchange if _EXCHANGE.match(event["name"]) else compute).append(span)
        elif not on_gpu and _EXCHANGE.match(event["name"]):
            exchange.append(span)
        elif not on_gpu and event["name"].startswith("aten::"):
            compute.append(span)
    step_seconds = union_length(steps)
    if not step_seconds:
        return {"communication": 0.0, "exposed": 0.0}
    begin, end = min(start for start, _ in steps), max(stop for _, stop in steps)
    exchange_in_steps = [
        (max(start, begin), min(stop, end)) for start, stop in exchange if start < end and stop > begin
    ]
    exposed = uncovered_length(exchange_in_steps, compute)
    return {"communication": union_length(exchange_in_steps) / step_seconds, "exposed": exposed / step_seconds}


def _is_relevant(event: Mapping[str, Any]) -> bool:
    """Leave out the profiler's events about itself."""
    if event["ph"] == "M":
        return event["name"] in ("thread_name", "thread_sort_index") and isinstance(event.get("pid"), int)
    return isinstance(event.get("pid"), int)


def _place_in_lane(event: Event, rank: int, offset_us: float, first_step: int) -> Event:
    moved_event = {**event, "pid": rank, "ts": event["ts"] + offset_us}
    if "id" in event:  # arrows must not cross lanes
        moved_event["id"] = f"{rank}.{event['id']}"
    if match := _STEP.fullmatch(event["name"]):
        moved_event["name"] = f"step {first_step + int(match[1])}"
    return moved_event


def _lane(rank: int, name: str) -> list[Event]:
    common = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]


_NO_PROFILER = contextlib.nullcontext()


def phase(name: str) -> contextlib.AbstractContextManager[object]:
    """Name a stretch of a step in the timeline; almost free while none is recorded."""
    if is_profiling():
        return torch.profiler.record_function(name)
    return _NO_PROFILER
