"""How many requests in flight suit one pod: what an autoscaler should aim at, for answers within a deadline.

More clients at a time gain throughput until the processor is busy; from there on they only wait longer. The target is
below both limits, that of the deadline and that of the gain, so that a pod has room while another one starts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve.contenders import CONTENDERS
from benchmarks.serve.load import LoadResult, RequestSpec, closed
from benchmarks.serve.running import Running, free_ports, log_file
from pipeline.contract.bundle import open_bundle
from pipeline.system.errors import StageError

_MOST_CLIENTS = 1024
_BUSY = 0.95  # of the best throughput: more clients gain little
_SHARE = 0.7  # of the limit
_OURS = next(contender for contender in CONTENDERS if contender.name == "ours")


@dataclass(frozen=True)
class Capacity:
    model: str
    deadline_ms: float
    steps: Sequence[tuple[int, LoadResult]]  # clients at a time, and what they measured
    target: int  # 0: not even one client is answered in time

    @property
    def per_second(self) -> float:
        """Requests a second with as many clients as the target, or the next fewer that were measured."""
        return max((result.per_second for clients, result in self.steps if clients <= self.target), default=0.0)


def measure(name: str, folder: Path, deadline_ms: float, seconds: float) -> Capacity:
    """Send a bundle's own golden request from ever more clients, until the slowest hundredth comes too late."""
    bundle = open_bundle(folder)
    with tempfile.TemporaryDirectory() as temporary, log_file() as log:
        http_port, grpc_port = free_ports(2)
        golden = bundle.golden_requests()[-1]
        body, headers = json.dumps(golden.body).encode(), (("content-type", "application/json"),)
        request_spec = RequestSpec(f"http://127.0.0.1:{http_port}{golden.path}", body, headers)
        running = Running(_OURS.name, _OURS.argv(folder, http_port, grpc_port, 0), log)
        try:
            running.wait_for_answer(request_spec)
            steps = _measure_steps(request_spec, deadline_ms, seconds, Path(temporary))
        finally:
            running.close()
    return Capacity(name, deadline_ms, steps, target(steps, deadline_ms))


def _measure_steps(
    request_spec: RequestSpec, deadline_ms: float, seconds: float, folder: Path
) -> list[tuple[int, LoadResult]]:
    closed(request_spec, 1, 1, folder)  # the first requests of a process are slow
    steps, clients = [], 1
    while clients <= _MOST_CLIENTS:
        result = closed(request_spec, clients, seconds, folder)
        if result.failed:
            raise StageError(f"with {clients} clients {result.failed} of {result.requests} requests failed")
        steps.append((clients, result))
        if result.p99_ms > deadline_ms:
            break
        clients *= 2
    return steps


def target(steps: Sequence[tuple[int, LoadResult]], deadline_ms: float) -> int:
    """Return the number of requests in flight that an autoscaler should aim at."""
    in_time = [clients for clients, result in steps if result.p99_ms <= deadline_ms]
    if not in_time:
        return 0
    best = max(result.per_second for _, result in steps)
    busy = next(clients for clients, result in steps if result.per_second >= _BUSY * best)
    return max(1, int(_SHARE * min(max(in_time), busy)))


def text(found: Sequence[Capacity]) -> str:
    return "\n\n".join(map(_text, found))


def _text(capacity: Capacity) -> str:
    head = f"{capacity.model}, deadline {capacity.deadline_ms:g} ms\n\n| clients | requests/s | p50 ms | p99 ms |"
    lines = [
        f"| {clients} | {result.per_second:,.0f} | {result.p50_ms:.2f} | {result.p99_ms:.2f} |"
        for clients, result in capacity.steps
    ]
    if capacity.target:
        advice = (
            f"deploy.target_concurrency={capacity.target}: about {capacity.per_second:,.0f} requests a second per pod"
        )
    else:
        advice = "not even one client is answered in time: the deadline is too short for this model on this machine"
    return "\n".join([head, "|---|---|---|---|", *lines, "", advice])
