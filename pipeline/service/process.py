"""The local prediction service as a background process: its record, its ports, its start and its end.

Is a service up, and does it answer over real HTTP what the bundle answered at export?
"""

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

import psutil

from pipeline.contract.errors import PipelineError, ResourceError, StageError
from pipeline.contract.files import write_json
from pipeline.contract.settings.access import ANYBODY, Access
from pipeline.contract.settings.section import Frozen

if TYPE_CHECKING:
    from pipeline.contract.bundle import Bundle

_DRAIN_SECONDS = 30.0


class Trial(Frozen):
    """A bundle that gets a share of the requests beside the one that gets the rest."""

    run: str
    bundle: str
    share: float


class Live(Frozen):
    """`runs/live.json`: the service that answers now."""

    name: str
    run: str
    bundle: str
    pid: int
    process_started: float  # tells this process from a later one with the same pid
    host: str
    port: int
    grpc_port: int
    asked_port: int
    since: str
    log: str
    access: Access = Access()
    admin_port: int = 0  # 0: it cannot be told anything
    token: str = ""  # the file that holds the admin interface's
    stamp: str = ""  # of what belongs to the process and not to the bundle
    max_body_bytes: int = 0  # of any request it takes, whatever its bundle says
    canary: Trial | None = None

    @property
    def url(self) -> str:
        return f"{self.access.scheme}://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return _process(self.pid, self.process_started) is not None


def read_live(runs: Path) -> Live | None:
    """The recorded service, whether or not it still lives."""
    path = runs / "live.json"
    if not path.exists():
        return None
    try:
        return Live.model_validate_json(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path}: damaged; remove it after ending the service by hand") from error


def write_live(runs: Path, live: Live | None) -> None:
    if live is None:
        (runs / "live.json").unlink(missing_ok=True)
    else:
        write_json(runs / "live.json", live.model_dump())


def spawn(argv: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that owes nothing to this one: own session, no terminal, no inherited file."""
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
    return float(psutil.Process(pid).create_time())


def end(pid: int, started: float, grace_seconds: float = _DRAIN_SECONDS) -> bool:
    """Let a service finish what it accepted, then end it. False when it was gone already."""
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


def forget_token(live: Live) -> None:
    """It opens nothing any more."""
    if live.token:
        Path(live.token).unlink(missing_ok=True)


def free_port(host: str, wanted: int, tries: int = 100) -> int:
    """The wanted port, or the next one nobody listens on."""
    for port in range(wanted, min(wanted + tries, 65536)):
        if port_is_free(host, port):
            return port
    raise ResourceError(f"no free port between {wanted} and {wanted + tries - 1} on {host}; set deploy.port")


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections winding down do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def any_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def request(
    host: str,
    port: int,
    method: str,
    path: str,
    body: Any = None,
    timeout_seconds: float = 30,
    access: Access = ANYBODY,
) -> tuple[int, Mapping[str, str], Any]:
    """One HTTP exchange in JSON, on a connection of its own."""
    connection = access.connection(host, port, timeout_seconds)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json", **access.headers()})
        answer = connection.getresponse()
        raw = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
    try:
        return answer.status, headers, json.loads(raw) if raw else None
    except ValueError:
        return answer.status, headers, raw.decode(errors="replace")


def service_environment() -> dict[str, str]:
    """Our own, less what belongs to the command that starts it."""
    dropped = ("PIPE_LEASH", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHONSAFEPATH": "1"}


def _process(pid: int, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


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
    from pipeline.contract.golden_http import golden_requests  # brings numpy, which other commands do without

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
    from pipeline.contract.golden_http import golden_requests  # as above

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
