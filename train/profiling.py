"""`trace: true`: a few steps of all processes as one file for Perfetto or chrome://tracing.

What the timelines of several processes say together: one file, and how much of the exchange was not hidden.

Names for stretches of a step, shown in a timeline; next to free while none is recorded.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.contract.files import write_atomic, write_json
from train.process_group import Group

TRACE_FILE = "trace.json.gz"
SHARES = "communication.json"
_MEETINGS = 5  # clocks are compared so often


class Tracer:
    """The profiler warms up one step before the first that is recorded."""

    def __init__(self, steps: range, group: Group, directory: Path) -> None:
        self._steps, self._group, self._directory = steps, group, directory
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Global step `step` comes next; all processes call this for the same steps."""
        if self._steps and step == self._steps.start - 1:
            self._profiler = _profiler(self._group.device, len(self._steps))
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
            if step == self._steps.stop:
                self._finish(self._profiler)

    def end(self, step: int) -> None:
        """Training is over after `step` steps."""
        self.before(step)
        if self._profiler is not None:
            self._profiler.stop()
        if self._group.rank.first and not (self._directory / TRACE_FILE).exists():
            print(f"no timeline: training ended after {step} steps, before those to be traced", flush=True)

    def _finish(self, profiler: profile) -> None:
        self._profiler = None
        profiler.stop()
        body = gzip.compress(json.dumps(_exported(profiler)).encode(), compresslevel=1)
        found = self._group.collect((socket.gethostname(), self._meet(), body))
        if self._group.rank.first:
            self._write([_timeline(*parts) for parts in found])

    def _write(self, timelines: list[Timeline]) -> None:
        events = merge(timelines, self._steps.start - 1)  # the profiler counts the step it warmed up in
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
        write_atomic(self._directory / TRACE_FILE, gzip.compress(text.encode(), mtime=0))
        found = {name: asdict(of) for name, of in shares(events).items()}
        write_json(self._directory / SHARES, {"first_step": self._steps.start, "steps": len(self._steps), **found})
        print(
            f"timeline of steps {self._steps.start} to {self._steps.stop - 1}: train/{TRACE_FILE} of the run",
            flush=True,
        )

    def _meet(self) -> tuple[int, ...]:
        """The time at which all leave a meeting, by this process's clock."""
        moments = []
        for _ in range(_MEETINGS):
            self._group.total([0.0])
            moments.append(time.time_ns())
        return tuple(moments)


def traced_steps(first: int, count: int, start: int, total: int) -> range:
    """Counted from where this process starts; earlier where training ends before."""
    count = min(count, max(0, total - start - 1))  # a step to warm up in comes first
    begin = max(start + 1, min(start + first, total - count))
    return range(begin, begin + count)


def _profiler(device: torch.device, steps: int) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), acc_events=True)


def _exported(profiler: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        body: dict[str, Any] = json.loads(path.read_text())
    return {"base_ns": body.get("baseTimeNanoseconds", 0), "events": body["traceEvents"]}


def _timeline(host: str, moments_ns: tuple[int, ...], body: bytes) -> Timeline:
    found = json.loads(gzip.decompress(body))
    return Timeline(host, moments_ns, found["base_ns"], found["events"])


Event: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[float, float]

_STEP = re.compile(r"ProfilerStep#(\d+)")
_EXCHANGE = re.compile(r"(gloo|nccl|mpi):|ncclDevKernel|ncclKernel")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Timeline:
    """Of one process, as its profiler wrote it."""

    host: str
    moments_ns: tuple[int, ...]  # its clock, each time all processes met
    base_ns: int  # what the events' times count from
    events: Sequence[Event]


@dataclass(frozen=True)
class Shares:
    """Parts of the traced steps' time."""

    communication: float  # an exchange was under way
    exposed: float  # and this process computed nothing meanwhile


def merge(timelines: Sequence[Timeline], first_step: int) -> list[Event]:
    """One lane for each process; all times in microseconds of the first process's clock, from the first event on."""
    shifts = clock_shifts_ns(timelines)
    merged: list[Event] = []
    for rank, (timeline, shift) in enumerate(zip(timelines, shifts, strict=True)):
        later = (timeline.base_ns - timelines[0].base_ns + shift) / 1e3
        merged += [_placed(event, rank, later, first_step) for event in timeline.events if _belongs(event)]
    origin = min((event["ts"] for event in merged if event["ph"] != "M"), default=0.0)
    for event in merged:
        event["ts"] = round(max(0.0, event["ts"] - origin), 3)
    names = [_lane(rank, f"rank {rank} ({timeline.host})") for rank, timeline in enumerate(timelines)]
    return [entry for lane in names for entry in lane] + merged


def clock_shifts_ns(timelines: Sequence[Timeline]) -> list[int]:
    """What to add to each process's clock; processes of one machine read the same one."""
    first = timelines[0]
    return [
        0
        if timeline.host == first.host
        else round(statistics.median(a - b for a, b in zip(first.moments_ns, timeline.moments_ns, strict=True)))
        for timeline in timelines
    ]


def shares(events: Iterable[Event]) -> dict[str, Shares]:
    """Of a merged timeline, by lane. Where a process used a GPU, its kernels are what counts."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            by_rank.setdefault(event["pid"], []).append(event)
    return {f"rank {rank}": _shares_of(by_rank[rank]) for rank in sorted(by_rank)}


def uncovered(spans: Iterable[Span], cover: Iterable[Span]) -> float:
    """Length of the union of `spans` outside the union of `cover`."""
    return length([*spans, *(cover := list(cover))]) - length(cover)


def length(spans: Iterable[Span]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _shares_of(events: Sequence[Event]) -> Shares:
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
    whole = length(steps)
    if not whole:
        return Shares(0.0, 0.0)
    begin, end = min(start for start, _ in steps), max(stop for _, stop in steps)
    within = [(max(start, begin), min(stop, end)) for start, stop in exchange if start < end and stop > begin]
    return Shares(length(within) / whole, uncovered(within, compute) / whole)


def _belongs(event: Mapping[str, Any]) -> bool:
    """The profiler's remarks about itself are left out."""
    if event["ph"] == "M":
        return event["name"] in ("thread_name", "thread_sort_index") and isinstance(event.get("pid"), int)
    return isinstance(event.get("pid"), int)


def _placed(event: Event, rank: int, later: float, first_step: int) -> Event:
    placed = {**event, "pid": rank, "ts": event["ts"] + later}
    if "id" in event:  # arrows from cause to effect must not cross lanes
        placed["id"] = f"{rank}.{event['id']}"
    if found := _STEP.fullmatch(event["name"]):
        placed["name"] = f"step {first_step + int(found[1])}"
    return placed


def _lane(rank: int, name: str) -> list[Event]:
    common = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]


_IDLE = contextlib.nullcontext()


def phase(name: str) -> contextlib.AbstractContextManager[object]:
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return _IDLE
