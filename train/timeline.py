"""What the timelines of several processes say together: one file, and how much of the exchange was not hidden."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
