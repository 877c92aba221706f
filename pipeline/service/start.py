"""Starting the local service: a process beside the one that serves, proven, then given the port."""

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
    Live,
    Trial,
    any_port,
    check_golden,
    end,
    forget_token,
    free_port,
    port_is_free,
    process_started,
    request,
    service_environment,
    spawn,
    wait_until_ready,
    write_live,
)
from pipeline.service.rollout import canary_share

DIGITS = 16  # of a bundle's digest, to name its version
_SWITCH_SECONDS = 10.0


@dataclass(frozen=True)
class Start:
    """What a process is started for; `options` are those it keeps for its life, `stamp` is of all it keeps."""

    run: Run
    bundle: Bundle
    access: Access
    options: list[str]
    stamp: str
    shadow: Path | None

    def share_beside(self, old: Live | None) -> float:
        """Of the requests, where the old bundle is to get the rest of them; else 0."""
        return canary_share(self.run.config) if old is not None and old.bundle != self.bundle.digest else 0.0


@dataclass(frozen=True)
class Ports:
    public: int
    grpc: int
    standby: int
    admin: int


def start(order: Start, old: Live | None, say: Callable[[str], None]) -> tuple[Live, int]:
    """Start beside the old service, prove it, let it take the port over, end the old one."""
    run, config = order.run, order.run.config.deploy
    public, grpc_port = choose_ports(config, old)
    if public != config.port and old is None:
        say(f"port {config.port} is taken; using {public}")
    if old is None and run.config.serve.canary:
        say("serve.canary: nothing serves yet, so this bundle gets all requests")
    ports = Ports(public, grpc_port, any_port(), any_port())
    log, token = run.path / "logs" / "service.log", _write_token(run.path / "admin.token")
    process = spawn(argv(order, ports, token, old), log, service_environment())
    started = process_started(process.pid)
    try:
        asked = _prove(process, order, ports, log)
        say(f"{asked} golden requests answered as at export")
        process.send_signal(signal.SIGUSR1)
        _wait_for_switch(order, public, process.pid, log)
    except BaseException:
        end(process.pid, started, grace_seconds=5)
        token.unlink(missing_ok=True)
        raise
    live = _record(order, ports, (process.pid, started), (token, log), old)
    write_live(run.runs, live)
    if old is not None:
        end(old.pid, old.process_started)
        forget_token(old)
        say(f"took over from pid {old.pid} (bundle {old.bundle[:12]})")
    say(f"live at {live.url} (gRPC {live.grpc_port}, pid {live.pid})")
    return live, asked


def argv(order: Start, ports: Ports, token: Path, old: Live | None) -> list[str]:
    """`python` of these words is the service."""
    name, serve, share = order.bundle.name, order.run.config.serve, order.share_beside(old)
    bundles = [f"{name}={order.run.bundle_path.resolve()}"]
    if old is not None and share:
        bundles.insert(0, f"{name}={Run(order.run.runs / old.run).bundle_path.resolve()}")
    words = ["-m", "serve", *bundles, "--host", order.run.config.deploy.host, "--port", str(ports.public)]
    words += ["--grpc-port", str(ports.grpc), "--standby", str(ports.standby)]
    words += ["--admin", str(ports.admin), "--admin-token", str(token), *order.options]
    words += ["--canary", str(share)] if share else []
    words += ["--shadow", str(order.shadow), "--shadow-share", str(serve.shadow_share)] if order.shadow else []
    return [*words, "--log-format", "text"]  # into a file that people read


def choose_ports(config: Deploy, old: Live | None) -> tuple[int, int]:
    """The old service's own ports when it was asked for the same one, else the next free pair."""
    if old is not None and (old.asked_port, old.host) == (config.port, config.host):
        return old.port, config.grpc_port or old.grpc_port
    port = free_port(config.host, config.port)
    grpc_port = config.grpc_port or free_port(config.host, port + 1)
    if config.grpc_port and not port_is_free(config.host, config.grpc_port):
        raise StageError(f"deploy.grpc_port={config.grpc_port} is taken on {config.host}")
    return port, grpc_port


def _prove(process: subprocess.Popen[bytes], order: Start, ports: Ports, log: Path) -> int:
    """On stand-by, where nobody else asks it."""
    wait_until_ready(process, ports.standby, log, order.run.config.deploy.timeout_seconds)
    digest = order.bundle.digest[:DIGITS]
    return check_golden("127.0.0.1", ports.standby, order.bundle, order.access.without_tls, digest)


def _record(order: Start, ports: Ports, process: tuple[int, float], files: tuple[Path, Path], old: Live | None) -> Live:
    run, bundle, share = order.run, order.bundle, order.share_beside(old)
    current = (old.run, old.bundle) if old is not None and share else (run.id, bundle.digest)
    return Live(
        name=bundle.name,
        run=current[0],
        bundle=current[1],
        pid=process[0],
        process_started=process[1],
        host=run.config.deploy.host,
        port=ports.public,
        grpc_port=ports.grpc,
        asked_port=run.config.deploy.port,
        since=now(),
        log=str(files[1]),
        access=order.access,
        admin_port=ports.admin,
        token=str(files[0]),
        stamp=order.stamp,
        max_body_bytes=bundle.signature.limits.max_body_bytes,
        canary=Trial(run=run.id, bundle=bundle.digest, share=share) if share else None,
    )


def _write_token(path: Path) -> Path:
    """Anew for each process; nobody else can ever have read it."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


def _wait_for_switch(order: Start, port: int, pid: int, log: Path) -> None:
    """Until the new process has answered on the public port."""
    host, deadline = order.run.config.deploy.host, time.monotonic() + _SWITCH_SECONDS
    while time.monotonic() < deadline:
        try:
            _, headers, _ = request(host, port, "GET", "/v2/health/ready", timeout_seconds=2, access=order.access)
            if headers.get("x-served-by") == str(pid):
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet: that is what is waited for
        time.sleep(0.01)
    raise StageError(f"the new service did not take over port {port} (log: {log})")
