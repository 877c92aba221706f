"""Closed loop: so many clients, each sending again as soon as it is answered; wrk for HTTP, h2load for gRPC."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.errors import ResourceError, StageError

_LUA = """
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
{headers}
done = function(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format("FOUND %d %d %d %d %d\\n", summary.requests, summary.duration, failed,
    latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True)
class RequestSpec:
    """One request, in one wire format, at one place."""

    url: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    grpc: bool = False


@dataclass(frozen=True)
class LoadResult:
    requests: int
    per_second: float
    p50_ms: float
    p99_ms: float
    failed: int


def missing() -> list[str]:
    return [name for name in ("wrk", "h2load") if shutil.which(name) is None]


def closed(request_spec: RequestSpec, concurrency: int, seconds: float, folder: Path) -> LoadResult:
    """Run a closed loop of clients; `folder` is for temporary files."""
    return (_h2load if request_spec.grpc else _wrk)(request_spec, concurrency, seconds, folder)


def _wrk(request_spec: RequestSpec, concurrency: int, seconds: float, folder: Path) -> LoadResult:
    body, script = folder / "body", folder / "ask.lua"
    body.write_bytes(request_spec.body)
    headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in request_spec.headers)
    script.write_text(_LUA.format(body=body, headers=headers))
    argv = ["wrk", "-t1", f"-c{concurrency}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "-s", str(script)]
    return read_wrk(_output([*argv, request_spec.url], seconds))


def read_wrk(text: str) -> LoadResult:
    match = re.search(r"FOUND (\d+) (\d+) (\d+) (\d+) (\d+)", text)
    if match is None:
        raise StageError(f"wrk printed: {text[-300:]}")
    requests, duration, failed, p50, p99 = (int(value) for value in match.groups())
    return LoadResult(requests, requests / (duration / 1e6), p50 / 1e3, p99 / 1e3, failed)


def _h2load(request_spec: RequestSpec, concurrency: int, seconds: float, folder: Path) -> LoadResult:
    body, log = folder / "message", folder / "h2load.log"
    body.write_bytes(request_spec.body)
    log.unlink(missing_ok=True)
    headers = [part for name, value in request_spec.headers for part in ("-H", f"{name}: {value}")]
    argv = ["h2load", "-t1", f"-c{concurrency}", "-m1", "-D", str(max(1, round(seconds))), "-d", str(body)]
    text = _output([*argv, f"--log-file={log}", *headers, request_spec.url], seconds)
    return read_h2load(text, log.read_text().splitlines())


def read_h2load(text: str, lines: Sequence[str]) -> LoadResult:
    """Read h2load's rate, and the percentiles from its log: start in µs, status, duration in µs."""
    finished = re.search(r"finished in ([\d.]+)(us|ms|s|m), ([\d.]+) req/s", text)
    if finished is None:
        raise StageError(f"h2load printed: {text[-300:]}")
    entries = [line.split("\t") for line in lines]
    failed = sum(status != "200" for _, status, _ in entries)
    latencies = sorted(int(microseconds) / 1e3 for _, _, microseconds in entries)
    return LoadResult(len(entries), float(finished[3]), percentile(latencies, 0.5), percentile(latencies, 0.99), failed)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of all; infinity without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def _output(argv: list[str], seconds: float) -> str:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"{argv[0]}: {error}; install wrk and nghttp2-client") from error
    return result.stdout + result.stderr
