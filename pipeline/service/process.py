"""The process of the local prediction service: its record, its ports, how it is started, checked and stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.bundle import PROBE_ID
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import ResourceError, StageError
from pipeline.system.files import write_json
from pipeline.system.processes import PARENT_WATCH_VARIABLE

if TYPE_CHECKING:
    import psutil

    from pipeline.contract.bundle import Bundle

_DRAIN_TIMEOUT_SECONDS = 30.0


class CanaryRecord(Frozen):
    """A bundle that gets a fraction of the requests while another one gets the rest."""

    run: str
    bundle: str
    share: float


class LiveService(Frozen):
    """The record of the live service, `runs/live.json`."""

    name: str
    run: str
    bundle: str
    pid: int
    process_started: float  # distinguishes this process from a later one with the same pid
    host: str
    port: int
    grpc_port: int
    health_port: int
    requested_port: int
    since: str
    log: str
    access: Access = Access()
    options: tuple[str, ...] = ()
    stamp: str = ""  # digest of the options and of the code that serves
    shadow: str = ""  # folder of the bundle that gets copies of the requests
    canary: CanaryRecord | None = None

    @property
    def url(self) -> str:
        return f"{self.access.scheme}://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return _process(self.pid, self.process_started) is not None


def read_live(runs: Path) -> LiveService | None:
    """Return the recorded service, whether or not its process is alive."""
    path = runs / "live.json"
    remedy = "stop the service by hand, then remove the file"
    return LiveService.parse(path.read_bytes(), path, remedy) if path.exists() else None


def read_status(live: LiveService) -> dict[str, Any] | None:
    """Return the versions that the service has and their roles; None if it does not answer."""
    try:
        _, _, body = send_request(live.host, live.health_port, "GET", "/status", timeout_seconds=10)
    except (OSError, http.client.HTTPException):
        return None
    status: dict[str, Any] | None = body["models"].get(live.name) if isinstance(body, dict) else None
    return status


def write_live(runs: Path, live: LiveService | None) -> None:
    if live is None:
        (runs / "live.json").unlink(missing_ok=True)
    else:
        write_json(runs / "live.json", live.model_dump())


def spawn(argv: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that is independent of this one: its own session, no terminal, no inherited files."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=dict(env),
            start_new_session=True,
            close_fds=True,
        )


def process_started(pid: int) -> float:
    import psutil  # slow to load

    return float(psutil.Process(pid).create_time())


def stop_process(pid: int, started: float, grace_seconds: float = _DRAIN_TIMEOUT_SECONDS) -> bool:
    """Let a service finish its accepted requests, then end it; return False if it had ended already."""
    import psutil  # slow to load

    process = _process(pid, started)
    if process is None:
        return False
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=grace_seconds)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(timeout=5)
    return True


def free_port(host: str, first: int, tries: int = 100) -> int:
    """Return the first free port from `first` on."""
    for port in range(first, min(first + tries, 65536)):
        if port_is_free(host, port):
            return port
    raise ResourceError(f"no free port between {first} and {first + tries - 1} on {host}; set deploy.port")


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def unused_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def send_request(
    host: str,
    port: int,
    method: str,
    path: str,
    body: Any = None,
    timeout_seconds: float = 30,
    access: Access = OPEN_ACCESS,
    request_id: str = "",
) -> tuple[int, Mapping[str, str], Any]:
    """Send one JSON request on its own connection; return status, headers and body."""
    connection = access.connection(host, port, timeout_seconds)
    try:
        payload = None if body is None else json.dumps(body)
        given = {"x-request-id": request_id} if request_id else {}
        connection.request(method, path, payload, {"Content-Type": "application/json", **given, **access.headers()})
        response = connection.getresponse()
        raw = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()
    try:
        return response.status, headers, json.loads(raw) if raw else None
    except ValueError:
        return response.status, headers, raw.decode(errors="replace")


def service_environment() -> dict[str, str]:
    """Return this process's environment without the variables that concern only a command."""
    command_variables = (PARENT_WATCH_VARIABLE, "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in command_variables} | {
        "PYTHONSAFEPATH": "1"
    }


def _process(pid: int, started: float) -> psutil.Process | None:
    import psutil  # slow to load

    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


_POLL_SECONDS = 0.02
_LATENCY_REQUESTS = 50


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StageError(f"the service ended while starting: {last_lines(log)} (log: {log})")
        try:
            status, _, _ = send_request("127.0.0.1", port, "GET", "/v2/health/ready", timeout_seconds=5)
            if status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        time.sleep(_POLL_SECONDS)
    raise StageError(f"the service was not ready within {timeout_seconds} s (log: {log})")


def check_golden(host: str, port: int, bundle: Bundle, access: Access = OPEN_ACCESS, version: str = "") -> int:
    """Check that each golden request is answered over HTTP as at export and by this bundle; return their number."""
    requests = bundle.golden_requests(version)
    for golden in requests:
        status, headers, answer = send_request(
            host, port, "POST", golden.path, golden.body, access=access, request_id=PROBE_ID
        )
        if status != 200:
            raise StageError(f"golden request {golden.path}: answered {status}: {str(answer)[:200]}")
        if headers.get("x-bundle-digest") != bundle.digest:
            raise StageError(f"golden request {golden.path}: answered by another bundle than {bundle.digest[:12]}")
        if problem := golden.problem(answer):
            raise StageError(f"golden request {golden.path}: {problem}; what is served is not what was evaluated")
    return len(requests)


def measure_latency(
    host: str, port: int, bundle: Bundle, access: Access = OPEN_ACCESS, version: str = ""
) -> dict[str, float]:
    """Measure the milliseconds of a golden request, sent several times in a row."""
    golden = bundle.golden_requests(version)[0]
    times = []
    for _ in range(_LATENCY_REQUESTS):
        started = time.perf_counter()
        send_request(host, port, "POST", golden.path, golden.body, access=access, request_id=PROBE_ID)
        times.append(1000 * (time.perf_counter() - started))
    cuts = statistics.quantiles(times, n=20)
    return {"p50": statistics.median(times), "p95": cuts[-1], "max": max(times), "requests": len(times)}


def last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(line.strip() for line in lines[-count:] if line.strip()) or "it left no log"
