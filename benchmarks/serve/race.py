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
from benchmarks.serve.load import Asking, Found, closed
from benchmarks.serve.message import framed, infer_request
from benchmarks.serve.running import Running, answers, free_ports, log_file
from benchmarks.serve.workloads import NAME, Workload
from pipeline.contract.errors import PipelineError

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
    found: Found
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
    memory_mb: float


@dataclass(frozen=True)
class Started:
    contender: Contender
    running: Running
    asking: dict[str, Asking]


def asking_of(workload: Workload, wire: str, path: str, http_port: int, grpc_port: int) -> Asking:
    url = f"http://127.0.0.1:{grpc_port if wire == GRPC else http_port}{path}"
    if wire == V1:
        return Asking(url, workload.json_v1(), (("content-type", "application/json"),))
    if wire == JSON:
        return Asking(url, workload.json_v2(), (("content-type", "application/json"),))
    if wire == BINARY:
        body, length = workload.binary_v2()
        kind = ("content-type", "application/octet-stream")
        return Asking(url, body, (kind, ("inference-header-content-length", str(length))))
    message = infer_request(NAME, "x", workload.datatype, (1, *workload.shape), workload.request.tobytes())
    return Asking(url, framed(message), (("content-type", "application/grpc"), ("te", "trailers")), grpc=True)


@contextlib.contextmanager
def started(workload: Workload, contenders: Sequence[Contender], bundle: Path) -> Iterator[list[Started]]:
    """One after the other, each held once it has answered; who cannot be started is left out with the reason."""
    with contextlib.ExitStack() as stack:
        found = []
        for one in contenders:
            http_port, grpc_port = free_ports(2)
            asking = {wire: asking_of(workload, wire, path, http_port, grpc_port) for wire, path in one.paths.items()}
            try:
                argv = one.argv(bundle, http_port, grpc_port, workload.threads)
                running = Running(one.name, argv, stack.enter_context(log_file()))
                stack.callback(running.close)
                running.wait_for_answer(next(ask for ask in asking.values() if not ask.grpc))
            except PipelineError as error:
                print(f"{one.name} is left out: {error}", file=sys.stderr)
                continue
            for wire in [wire for wire, ask in asking.items() if not answers(ask)]:
                print(f"{one.name} over {wire} is left out: it answers without a prediction", file=sys.stderr)
                del asking[wire]
            found.append(Started(one, running, asking))
            running.hold()
        yield found


def race(workload: Workload, contenders: Sequence[Contender], size: Size) -> tuple[list[Row], list[Start]]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = workload.bundle(Path(folder) / "bundle")
        with started(workload, contenders, bundle) as running:
            starts = [_start(workload, one) for one in running]
            laps: dict[tuple[int, str, str], list[Lap]] = {}
            for concurrency in size.concurrency:
                for number in range(size.rounds):
                    limit = _limit(workload, bundle, concurrency, size.seconds)
                    laps.setdefault((concurrency, BARE, "-"), []).append(limit)
                    for one in running[:: 1 if number % 2 == 0 else -1]:
                        for wire, asking in one.asking.items():
                            if lap := _lap(one, asking, concurrency, size.seconds, limit.raw, Path(folder)):
                                laps.setdefault((concurrency, one.contender.name, wire), []).append(lap)
    return [row(workload.name, *key, found) for key, found in laps.items()], starts


def row(workload: str, concurrency: int, contender: str, wire: str, laps: Sequence[Lap]) -> Row:
    """A ratio compares a lap with the bare runtime of the same round."""
    median = statistics.median
    return Row(
        workload,
        concurrency,
        contender,
        wire,
        per_second=median(lap.found.per_second for lap in laps),
        to_raw=median(lap.found.per_second / lap.raw for lap in laps),
        p50_ms=median(lap.found.p50_ms for lap in laps),
        p99_ms=median(lap.found.p99_ms for lap in laps),
        cpu_us=median(lap.cpu_us for lap in laps),
        failed=sum(lap.found.failed for lap in laps),
    )


def _limit(workload: Workload, bundle: Path, concurrency: int, seconds: float) -> Lap:
    """The bare runtime where it is best with what so many clients can give it at once."""
    rows = [count for count in (1, 8, 32) if count <= concurrency]
    speed = raw.best(bundle / "model.onnx", workload.threads, seconds / len(rows), rows)
    found = Found(round(speed.per_second), speed.per_second, speed.run_ms, speed.run_ms, 0)
    return Lap(found, speed.cpu_us, speed.per_second)


def _lap(one: Started, asking: Asking, concurrency: int, seconds: float, limit: float, folder: Path) -> Lap | None:
    """Return None if the contender failed; the reason is printed."""
    one.running.go_on()
    try:
        closed(asking, concurrency, 1, folder)  # so that it is warm, whatever it keeps
        before = one.running.cpu_seconds()
        found = closed(asking, concurrency, seconds, folder)
        cpu = one.running.cpu_seconds() - before
    except PipelineError as error:
        print(f"{one.contender.name} at {concurrency} misses a turn: {error}", file=sys.stderr)
        return None
    finally:
        one.running.hold()
    return Lap(found, cpu / max(1, found.requests) * 1e6, limit)


def _start(workload: Workload, one: Started) -> Start:
    return Start(
        workload.name, one.contender.name, one.running.seconds_to_answer, one.running.memory_bytes() / (1 << 20)
    )
