"""Is a service up, and does it answer over real HTTP what the bundle answered at export?"""

from __future__ import annotations

import http.client
import statistics
import subprocess
import time
from pathlib import Path

from pipeline.service import request
from pipeline.spec.access import ANYBODY, Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import StageError
from pipeline.spec.golden_http import golden_requests

_POLL_SECONDS = 0.02
_LATENCY_REQUESTS = 50


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StageError(f"the service ended at its start: {last_lines(log)} (log: {log})")
        try:
            status, _, _ = request("127.0.0.1", port, "GET", "/v2/health/ready", timeout_seconds=5)
            if status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet: that is what is waited for
        time.sleep(_POLL_SECONDS)
    raise StageError(f"the service was not ready within {timeout_seconds} s (log: {log})")


def check_golden(host: str, port: int, bundle: Bundle, access: Access = ANYBODY, version: str = "") -> int:
    """Every golden request over HTTP, answered as at export and by this bundle. Returns how many were asked."""
    asked = list(golden_requests(bundle, version))
    for golden in asked:
        status, headers, answer = request(host, port, "POST", golden.path, golden.body, access=access)
        if status != 200:
            raise StageError(f"golden request {golden.path}: answered {status}: {str(answer)[:200]}")
        if headers.get("x-bundle-digest") != bundle.digest:
            raise StageError(f"golden request {golden.path}: answered by another bundle than {bundle.digest[:12]}")
        if problem := golden.problem(answer):
            raise StageError(f"golden request {golden.path}: {problem}; what runs is not what was judged")
    return len(asked)


def latency(host: str, port: int, bundle: Bundle, access: Access = ANYBODY, version: str = "") -> dict[str, float]:
    """Milliseconds of the first golden request, one after the other, as a client would see them."""
    golden = next(golden_requests(bundle, version))
    times = []
    for _ in range(_LATENCY_REQUESTS):
        started = time.perf_counter()
        request(host, port, "POST", golden.path, golden.body, access=access)
        times.append(1000 * (time.perf_counter() - started))
    cuts = statistics.quantiles(times, n=20)
    return {"p50": statistics.median(times), "p95": cuts[-1], "max": max(times), "requests": len(times)}


def last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(line.strip() for line in lines[-count:] if line.strip()) or "it left no log"
