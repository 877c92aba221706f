"""Start the local service: a new process is verified on a standby port, then takes over the public one."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import StageError
from pipeline.contract.run import Run
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Deploy
from pipeline.history import now
from pipeline.service.process import (
    Canary,
    LiveService,
    check_golden,
    forget_token,
    free_port,
    process_started,
    send_request,
    service_environment,
    spawn,
    stop_process,
    unused_port,
    wait_until_ready,
    write_live,
)
from pipeline.service.rollout import canary_share

VERSION_DIGITS = 16  # of a bundle's digest: the name of its version
_SWITCH_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class ServiceStart:
    """What to start a process with; `options` are fixed for its lifetime, and `stamp` is their digest."""

    run: Run
    bundle: Bundle
    access: Access
    options: list[str]
    stamp: str
    shadow: Path | None

    def canary_share(self, old: LiveService | None) -> float:
        """Return this bundle's fraction of the requests, if the old bundle gets the others; else 0."""
        return canary_share(self.run.config) if old is not None and old.bundle != self.bundle.digest else 0.0


@dataclass(frozen=True)
class Ports:
    public: int
    grpc: int
    standby: int
    admin: int


def start(request: ServiceStart, old: LiveService | None, report: Callable[[str], None]) -> tuple[LiveService, int]:
    """Start a process next to the old one, verify it, let it take over the port, and stop the old one.

    Returns the new record and the number of golden requests.
    """
    run, config = request.run, request.run.config.deploy
    public, grpc_port = choose_ports(config, old)
    if public != config.port and old is None:
        report(f"port {config.port} is taken; using {public}")
    if old is None and run.config.rollout.canary_percent:
        report("rollout.canary_percent: no service is live yet, so this bundle gets all requests")
    ports = Ports(public, grpc_port, unused_port(), unused_port())
    log, token = run.path / "logs" / "service.log", _write_token(run.path / "admin.token")
    process = spawn(argv(request, ports, token, old), log, service_environment())
    started = process_started(process.pid)
    try:
        golden_count = _verify(process, request, ports, log)
        report(f"{golden_count} golden requests answered as at export")
        process.send_signal(signal.SIGUSR1)
        _wait_for_switch(request, public, process.pid, log)
    except BaseException:
        stop_process(process.pid, started, grace_seconds=5)
        token.unlink(missing_ok=True)
        raise
    live = _record(request, ports, (process.pid, started), (token, log), old)
    write_live(run.runs, live)
    if old is not None:
        stop_process(old.pid, old.process_started)
        forget_token(old)
        report(f"took over from pid {old.pid} (bundle {old.bundle[:12]})")
    report(f"live at {live.url} (gRPC {live.grpc_port}, pid {live.pid})")
    return live, golden_count


def argv(request: ServiceStart, ports: Ports, token: Path, old: LiveService | None) -> list[str]:
    """Return the arguments of the Python that runs the service."""
    name, share = request.bundle.name, request.canary_share(old)
    bundles = [f"{name}={request.run.bundle_path.resolve()}"]
    if old is not None and share:
        bundles.insert(0, f"{name}={Run(request.run.runs / old.run).bundle_path.resolve()}")
    arguments = ["-m", "serve", *bundles, "--host", request.run.config.deploy.host, "--port", str(ports.public)]
    arguments += ["--grpc-port", str(ports.grpc), "--standby", str(ports.standby)]
    arguments += ["--admin", str(ports.admin), "--admin-token", str(token), *request.options]
    arguments += ["--canary", str(share)] if share else []
    arguments += ["--shadow", str(request.shadow)] if request.shadow else []
    return [*arguments, "--log-format", "text"]


def choose_ports(config: Deploy, old: LiveService | None) -> tuple[int, int]:
    """Keep the old service's ports if the configured address is the same, else take the next free ones."""
    if old is not None and (old.requested_port, old.host) == (config.port, config.host):
        return old.port, old.grpc_port
    port = free_port(config.host, config.port)
    return port, free_port(config.host, port + 1)


def _verify(process: subprocess.Popen[bytes], request: ServiceStart, ports: Ports, log: Path) -> int:
    """Check the golden requests on the standby port, which gets no other requests."""
    wait_until_ready(process, ports.standby, log, request.run.config.deploy.timeout_seconds)
    digest = request.bundle.digest[:VERSION_DIGITS]
    return check_golden("127.0.0.1", ports.standby, request.bundle, request.access.without_tls, digest)


def _record(
    request: ServiceStart, ports: Ports, process: tuple[int, float], files: tuple[Path, Path], old: LiveService | None
) -> LiveService:
    run, bundle, share = request.run, request.bundle, request.canary_share(old)
    current = (old.run, old.bundle) if old is not None and share else (run.id, bundle.digest)
    return LiveService(
        name=bundle.name,
        run=current[0],
        bundle=current[1],
        pid=process[0],
        process_started=process[1],
        host=run.config.deploy.host,
        port=ports.public,
        grpc_port=ports.grpc,
        requested_port=run.config.deploy.port,
        since=now(),
        log=str(files[1]),
        access=request.access,
        admin_port=ports.admin,
        token=str(files[0]),
        stamp=request.stamp,
        max_body_bytes=bundle.signature.limits.max_body_bytes,
        canary=Canary(run=run.id, bundle=bundle.digest, share=share) if share else None,
    )


def _write_token(path: Path) -> Path:
    """Write a new token for each process, in a file that only this user can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


def _wait_for_switch(request: ServiceStart, port: int, pid: int, log: Path) -> None:
    """Wait until the new process answers on the public port."""
    host, deadline = request.run.config.deploy.host, time.monotonic() + _SWITCH_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            _, headers, _ = send_request(
                host, port, "GET", "/v2/health/ready", timeout_seconds=2, access=request.access
            )
            if headers.get("x-served-by") == str(pid):
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        time.sleep(0.01)
    raise StageError(f"the new service did not take over port {port} (log: {log})")
