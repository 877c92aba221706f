"""`trace: true`: a few steps of all processes as one file for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.spec.files import write_atomic, write_json
from train.group import Group
from train.timeline import Timeline, merge, shares

FILE = "trace.json.gz"
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
        if self._group.rank.first and not (self._directory / FILE).exists():
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
        write_atomic(self._directory / FILE, gzip.compress(text.encode(), mtime=0))
        found = {name: asdict(of) for name, of in shares(events).items()}
        write_json(self._directory / SHARES, {"first_step": self._steps.start, "steps": len(self._steps), **found})
        print(f"timeline of steps {self._steps.start} to {self._steps.stop - 1}: train/{FILE} of the run", flush=True)

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
