"""Interleaved measurement: all contenders are started, all but one are paused, and they take turns in rounds."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve import raw
from benchmarks.serve.contenders import BINARY, GRPC, JSON, V1, Contender
from benchmarks.serve.load import LoadResult, RequestSpec, closed
from benchmarks.serve.message import framed, infer_request
from benchmarks.serve.running import Running, answers, free_ports, log_file
from benchmarks.serve.workloads import NAME, Workload
from pipeline.system.errors import PipelineError

BARE = "bare runtime"


@dataclass(frozen=True)
class Size:
    seconds: float
    rounds: int
    concurrency: tuple[int, ...]


FULL = Size(2.0, 3, (1, 8, 32, 64))
QUICK = Size(1.0, 1, (32,))


@dataclass(frozen=True)
class Lap:
    result: LoadResult
    cpu_us: float  # of the contender's processes for each request
    raw: float  # rows a second of the bare runtime in the same round


@dataclass(frozen=True)
class Row:
    """One contender over one wire format, at one concurrency: medians of the rounds."""

    workload: str
    concurrency: int
    contender: str
    wire: str
    per_second: float
    to_raw: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    failed: int


@dataclass(frozen=True)
class Start:
    workload: str
    contender: str
    seconds: float
    cpu_seconds: float
    memory_mb: float


@dataclass(frozen=True)
class Started:
    contender: Contender
    running: Running
    request_specs: dict[str, RequestSpec]


def make_request_spec(workload: Workload, wire: str, path: str, http_port: int, grpc_port: int) -> RequestSpec:
    url = f"http://127.0.0.1:{grpc_port if wire == GRPC else http_port}{path}"
    if wire == V1:
        return RequestSpec(url, workload.json_v1(), (("content-type", "application/json"),))
    if wire == JSON:
        return RequestSpec(url, workload.json_v2(), (("content-type", "application/json"),))
    if wire == BINARY:
        body, length = workload.binary_v2()
        kind = ("content-type", "application/octet-stream")
        return RequestSpec(url, body, (kind, ("inference-header-content-length", str(length))))
    message = infer_request(NAME, "x", workload.datatype, (1, *workload.shape), workload.request.tobytes())
    return RequestSpec(url, framed(message), (("content-type", "application/grpc"), ("te", "trailers")), grpc=True)


@contextlib.contextmanager
def start_services(workload: Workload, contenders: Sequence[Contender], bundle: Path) -> Iterator[list[Started]]:
    """Start services one after the other and pause each; print the reason for those that do not start."""
    with contextlib.ExitStack() as stack:
        services = []
        for contender in contenders:
            http_port, grpc_port = free_ports(2)
            request_specs = {
                wire: make_request_spec(workload, wire, path, http_port, grpc_port)
                for wire, path in contender.paths.items()
            }
            try:
                argv = contender.argv(bundle, http_port, grpc_port, workload.threads)
                running = Running(contender.name, argv, stack.enter_context(log_file()))
                stack.callback(running.close)
                running.wait_for_answer(next(ask for ask in request_specs.values() if not ask.grpc))
            except PipelineError as error:
                print(f"{contender.name} is left out: {error}", file=sys.stderr)
                continue
            for wire in [wire for wire, ask in request_specs.items() if not answers(ask)]:
                print(f"{contender.name} over {wire} is left out: it answers without a prediction", file=sys.stderr)
                del request_specs[wire]
            services.append(Started(contender, running, request_specs))
            running.hold()
        yield services


def race(workload: Workload, contenders: Sequence[Contender], size: Size) -> tuple[list[Row], list[Start]]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = workload.bundle(Path(folder) / "bundle")
        with start_services(workload, contenders, bundle) as running:
            starts = [_start(workload, service) for service in running]
            laps: dict[tuple[int, str, str], list[Lap]] = {}
            for concurrency in size.concurrency:
                for number in range(size.rounds):
                    limit = _limit(workload, bundle, concurrency, size.seconds)
                    laps.setdefault((concurrency, BARE, "-"), []).append(limit)
                    for contestant in running[:: 1 if number % 2 == 0 else -1]:
                        for wire, request_spec in contestant.request_specs.items():
                            if lap := _lap(
                                contestant, request_spec, concurrency, size.seconds, limit.raw, Path(folder)
                            ):
                                laps.setdefault((concurrency, contestant.contender.name, wire), []).append(lap)
    return [row(workload.name, *key, group) for key, group in laps.items()], starts


def race_starts(workload: Workload, contenders: Sequence[Contender], rounds: int) -> list[Start]:
    """Start each contender until its first answer, in turn, and end it; return the medians of the rounds."""
    starts: dict[str, list[Start]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = workload.bundle(Path(folder) / "bundle")
        for number in range(rounds):
            for contender in contenders[:: 1 if number % 2 == 0 else -1]:
                with start_services(workload, [contender], bundle) as services:
                    for service in services:
                        starts.setdefault(contender.name, []).append(_start(workload, service))
    return [
        Start(
            workload.name,
            name,
            statistics.median(start.seconds for start in group),
            statistics.median(start.cpu_seconds for start in group),
            statistics.median(start.memory_mb for start in group),
        )
        for name, group in starts.items()
    ]


def row(workload: str, concurrency: int, contender: str, wire: str, laps: Sequence[Lap]) -> Row:
    """Summarise laps; a ratio compares a lap with the bare runtime of the same round."""
    median = statistics.median
    return Row(
        workload,
        concurrency,
        contender,
        wire,
        per_second=median(lap.result.per_second for lap in laps),
        to_raw=median(lap.result.per_second / lap.raw for lap in laps),
        p50_ms=median(lap.result.p50_ms for lap in laps),
        p99_ms=median(lap.result.p99_ms for lap in laps),
        cpu_us=median(lap.cpu_us for lap in laps),
        failed=sum(lap.result.failed for lap in laps),
    )


def _limit(workload: Workload, bundle: Path, concurrency: int, seconds: float) -> Lap:
    """Measure the bare runtime at its best batch size that this many clients can fill."""
    rows = [count for count in (1, 8, 32) if count <= concurrency]
    speed = raw.best(bundle / "model.onnx", workload.threads, seconds / len(rows), rows)
    result = LoadResult(round(speed.per_second), speed.per_second, speed.run_ms, speed.run_ms, 0)
    return Lap(result, speed.cpu_us, speed.per_second)


def _lap(
    service: Started, request_spec: RequestSpec, concurrency: int, seconds: float, limit: float, folder: Path
) -> Lap | None:
    """Return None if the contender failed; the reason is printed."""
    service.running.go_on()
    try:
        closed(request_spec, concurrency, 1, folder)  # so that it is warm, whatever it keeps
        cpu_before = service.running.cpu_seconds()
        result = closed(request_spec, concurrency, seconds, folder)
        cpu = service.running.cpu_seconds() - cpu_before
    except PipelineError as error:
        print(f"{service.contender.name} at {concurrency} misses a turn: {error}", file=sys.stderr)
        return None
    finally:
        service.running.hold()
    return Lap(result, cpu / max(1, result.requests) * 1e6, limit)


def _start(workload: Workload, service: Started) -> Start:
    return Start(
        workload.name,
        service.contender.name,
        service.running.seconds_to_answer,
        service.running.cpu_seconds(),
        service.running.memory_bytes() / (1 << 20),
    )
