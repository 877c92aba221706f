"""The local prediction service as a background process: started, looked at, taken over, ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import PipelineError, ResourceError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.golden import difference
from pipeline.spec.signature import Frozen

_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 30.0


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

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

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
    host: str, port: int, method: str, path: str, body: Any = None, timeout_seconds: float = 30
) -> tuple[int, Mapping[str, str], Any]:
    """One HTTP exchange in JSON, on a connection of its own."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
    try:
        return answer.status, headers, json.loads(raw) if raw else None
    except ValueError:
        return answer.status, headers, raw.decode(errors="replace")


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


def check_golden(host: str, port: int, bundle: Bundle) -> int:
    """The golden requests over HTTP, answered as at export. Returns how many were asked."""
    golden = bundle.golden()
    asked = 0
    if golden.instances:
        body = {"instances": golden.instances}
        answer = _answer(host, port, f"/v1/models/{bundle.name}:predict", body, bundle.digest)
        _require(difference(golden.predictions, answer.get("predictions"), golden.rtol, golden.atol, "predictions"))
        asked += 1
    tensors = [
        {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
        for spec in bundle.signature.inputs
        for array in [golden.inputs[spec.name]]
    ]
    answer = _answer(host, port, f"/v2/models/{bundle.name}/infer", {"inputs": tensors}, bundle.digest)
    found = {output["name"]: output for output in answer.get("outputs", [])}
    for name, expected in golden.outputs.items():
        data = found.get(name, {}).get("data")
        _require(difference(expected.ravel().tolist(), data, golden.rtol, golden.atol, name))
    return asked + 1


def last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(line.strip() for line in lines[-count:] if line.strip()) or "it left no log"


def service_environment() -> dict[str, str]:
    """Our own, less what belongs to the command that starts it."""
    dropped = ("PIPE_LEASH", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHONSAFEPATH": "1"}


def _answer(host: str, port: int, path: str, body: Any, digest: str) -> dict[str, Any]:
    status, headers, answer = request(host, port, "POST", path, body)
    if status != 200 or not isinstance(answer, dict):
        raise StageError(f"golden request {path}: answered {status}: {str(answer)[:200]}")
    if headers.get("x-bundle-digest") != digest:
        raise StageError(f"golden request {path}: answered by bundle {headers.get('x-bundle-digest')}, not {digest}")
    return answer


def _require(problem: str | None) -> None:
    if problem:
        raise StageError(f"golden request: {problem}")


def _process(pid: int, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None
