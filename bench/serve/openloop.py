"""Ours under requests that come at fixed rates: below its capacity, and at twice of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve.contenders import BINARY, CONTENDERS, JSON
from bench.serve.load import Asking, closed
from bench.serve.race import Started, started
from bench.serve.workloads import Workload
from pipeline.spec.errors import StageError

_SHARES = (0.25, 0.5, 0.75)
_CLIENTS = 32
_DEADLINE_SECONDS = 1.0


@dataclass(frozen=True)
class Rate:
    """Requests of V2 JSON that came at this rate."""

    workload: str
    per_second: float
    share: float  # of what closed-loop clients got just before
    p50_ms: float
    p99_ms: float
    failed: int


@dataclass(frozen=True)
class Overload:
    workload: str
    seconds: float
    deadline_seconds: float
    capacity: float  # requests a second of closed-loop clients, before and after
    goodput: float  # predictions a second at twice of it
    p99_ms: float  # of predictions
    refused: int  # 503
    refused_p99_ms: float
    failed: int  # everything else


def rates(workload: Workload, seconds: float) -> list[Rate]:
    with _ours(workload) as (one, folder):
        asking = one.asking[JSON]
        top = _capacity(asking, folder)
        found = []
        for share in _SHARES:
            told = _arrive(asking, top * share, seconds, folder)
            failed = told["failed"] + told["sent"] - told["statuses"].get("200", 0)
            found.append(Rate(workload.name, top * share, share, told["p50_ms"], told["p99_ms"], failed))
        return found


def overload(workload: Workload, seconds: float) -> Overload:
    with _ours(workload) as (one, folder):
        asking = one.asking[BINARY]
        before = _capacity(asking, folder)
        within = (*asking.headers, ("x-request-timeout", str(_DEADLINE_SECONDS)))
        told = _arrive(Asking(asking.url, asking.body, within), 2 * before, seconds, folder)
        capacity = (before + _capacity(asking, folder)) / 2
    return judged(workload.name, seconds, capacity, told)


def judged(workload: str, seconds: float, capacity: float, told: dict[str, Any]) -> Overload:
    """`told` is what the arrivals counted."""
    statuses = told["statuses"]
    good, refused = statuses.get("200", 0), statuses.get("503", 0)
    return Overload(
        workload,
        seconds,
        _DEADLINE_SECONDS,
        capacity,
        goodput=good / seconds,
        p99_ms=told["p99_ms"],
        refused=refused,
        refused_p99_ms=told["refused_p99_ms"],
        failed=told["failed"] + sum(statuses.values()) - good - refused,
    )


def text(rows: Sequence[Rate]) -> str:
    lines = [
        f"| {row.workload} | {row.per_second:,.0f} | {row.share:.2f} | {row.p50_ms:.2f} | {row.p99_ms:.2f} "
        f"| {row.failed} |"
        for row in rows
    ]
    return "\n".join(
        ["| model | requests/s | of capacity | p50 ms | p99 ms | failed |", "|---|---|---|---|---|---|", *lines]
    )


def overload_text(rows: Sequence[Overload]) -> str:
    head = "| model | seconds | capacity/s | goodput ÷ capacity | p99 ms | deadline ms | 503 | their p99 ms | failed |"
    lines = [
        f"| {row.workload} | {row.seconds:.0f} | {row.capacity:,.0f} | {row.goodput / row.capacity:.3f} "
        f"| {row.p99_ms:.0f} | {row.deadline_seconds * 1e3:.0f} | {row.refused} | {row.refused_p99_ms:.1f} "
        f"| {row.failed} |"
        for row in rows
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *lines])


@contextmanager
def _ours(workload: Workload) -> Iterator[tuple[Started, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = workload.bundle(Path(folder) / "bundle")
        with started(workload, [one for one in CONTENDERS if one.name == "ours"], bundle) as found:
            if not found:
                raise StageError("the service did not start; the line above says why")
            found[0].running.go_on()
            yield found[0], Path(folder)


def _capacity(asking: Asking, folder: Path) -> float:
    closed(asking, _CLIENTS, 1, folder)
    return closed(asking, _CLIENTS, 3, folder).per_second


def _arrive(asking: Asking, rate: float, seconds: float, folder: Path) -> dict[str, Any]:
    body = folder / "arriving"
    body.write_bytes(asking.body)
    told = {"url": asking.url, "body": str(body), "headers": dict(asking.headers), "rate": rate, "seconds": seconds}
    argv = [sys.executable, "-m", "bench.serve.arrivals", json.dumps(told)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=seconds + 120, check=False)
    if done.returncode:
        raise StageError(f"the arrivals failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
