"""Ours under requests that come at fixed rates: below its capacity, and at twice of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve.arrivals import Arrived
from benchmarks.serve.contenders import BINARY, CONTENDERS, JSON
from benchmarks.serve.load import RequestSpec, closed
from benchmarks.serve.race import Started, start_services
from benchmarks.serve.workloads import Workload
from pipeline.system.errors import StageError

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
    client_cores: float  # of the processor, on average; both sides share the machine
    service_cores: float


@dataclass(frozen=True)
class Overload:
    workload: str
    seconds: float
    deadline_seconds: float
    capacity: float  # requests a second of closed-loop clients, before and after
    goodput: float  # predictions a second within the deadline, at twice of it
    p99_ms: float  # of predictions
    refused: int  # 503
    refused_p99_ms: float
    failed: int  # everything else
    late_p99_ms: float  # how long after its time the client sent a request; part of the times above
    client_cores: float  # of the processor, on average; both sides share the machine
    service_cores: float


def rates(workload: Workload, seconds: float) -> list[Rate]:
    with _start_our_service(workload) as (service, folder):
        request_spec = service.request_specs[JSON]
        capacity = _capacity(request_spec, folder)
        results = []
        for share in _SHARES:
            arrived, cores = _arrive(service, request_spec, capacity * share, seconds, folder)
            failed = arrived.due - arrived.predictions
            results.append(Rate(workload.name, capacity * share, share, arrived.p50_ms, arrived.p99_ms, failed, *cores))
        return results


def overload(workload: Workload, seconds: float) -> Overload:
    with _start_our_service(workload) as (service, folder):
        request_spec = service.request_specs[BINARY]
        capacity_before = _capacity(request_spec, folder)
        arrived, cores = _arrive(service, request_spec, 2 * capacity_before, seconds, folder, _DEADLINE_SECONDS)
        capacity = (capacity_before + _capacity(request_spec, folder)) / 2
    return summarize(workload.name, capacity, arrived, cores)


def summarize(workload: str, capacity: float, arrived: Arrived, cores: tuple[float, float]) -> Overload:
    """Summarise the arrivals; `cores` are those used by the client and by the service."""
    return Overload(
        workload,
        arrived.seconds,
        _DEADLINE_SECONDS,
        capacity,
        arrived.predictions / arrived.seconds,
        arrived.p99_ms,
        arrived.refused,
        arrived.refused_p99_ms,
        arrived.failed,
        arrived.late_p99_ms,
        *cores,
    )


def text(rows: Sequence[Rate]) -> str:
    lines = [
        f"| {row.workload} | {row.per_second:,.0f} | {row.share:.2f} | {row.p50_ms:.2f} | {row.p99_ms:.2f} "
        f"| {row.failed} | {row.client_cores:.2f} | {row.service_cores:.2f} |"
        for row in rows
    ]
    head = "| model | requests/s | of capacity | p50 ms | p99 ms | failed | client cores | service cores |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *lines])


def overload_text(rows: Sequence[Overload]) -> str:
    head = (
        "| model | seconds | capacity/s | goodput ÷ capacity | p99 ms | deadline ms | 503 | their p99 ms | failed "
        "| sent late p99 ms | client cores | service cores |"
    )
    lines = [
        f"| {row.workload} | {row.seconds:.0f} | {row.capacity:,.0f} | {row.goodput / row.capacity:.3f} "
        f"| {row.p99_ms:.0f} | {row.deadline_seconds * 1e3:.0f} | {row.refused} | {row.refused_p99_ms:.1f} "
        f"| {row.failed} | {row.late_p99_ms:.1f} | {row.client_cores:.2f} | {row.service_cores:.2f} |"
        for row in rows
    ]
    return "\n".join([head, "|---" * 12 + "|", *lines])


@contextmanager
def _start_our_service(workload: Workload) -> Iterator[tuple[Started, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = workload.bundle(Path(folder) / "bundle")
        with start_services(
            workload, [contender for contender in CONTENDERS if contender.name == "ours"], bundle
        ) as services:
            if not services:
                raise StageError("the service did not start; see the line above")
            services[0].running.go_on()
            yield services[0], Path(folder)


def _capacity(request_spec: RequestSpec, folder: Path) -> float:
    closed(request_spec, _CLIENTS, 1, folder)
    return closed(request_spec, _CLIENTS, 3, folder).per_second


def _arrive(
    started: Started,
    request_spec: RequestSpec,
    rate: float,
    seconds: float,
    folder: Path,
    deadline_seconds: float = math.inf,
) -> tuple[Arrived, tuple[float, float]]:
    """Send requests at a rate; return the result, and the cores used by client and service on average."""
    body = folder / "arriving"
    body.write_bytes(request_spec.body)
    arguments = {
        "url": request_spec.url,
        "body": str(body),
        "headers": dict(request_spec.headers),
        "rate": rate,
        "seconds": seconds,
        "deadline_seconds": deadline_seconds,
    }
    argv = [sys.executable, "-m", "benchmarks.serve.arrivals", json.dumps(arguments)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    cpu_before = started.running.cpu_seconds()
    result = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=seconds + 120, check=False)
    service_cpu = started.running.cpu_seconds() - cpu_before
    if result.returncode:
        raise StageError(f"the arrivals failed: {result.stderr.strip().splitlines()[-1:]}")
    arrived = Arrived.of(json.loads(result.stdout))
    return arrived, (arrived.cpu_seconds / arrived.seconds, service_cpu / arrived.seconds)
