"""Start the local service and roll out bundles to it: canary, rollback, and promotion in the registry.

Each change is a new process, which is verified on a standby port before it takes over the public one.
"""

from __future__ import annotations

import http.client
import json
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.registry import (
    CHAMPION,
    PREVIOUS,
    Entry,
    ProposedChange,
    Registry,
    change_registry,
    current_user,
    publish,
)
from pipeline.contract.run import Run
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import sampling_options, service_view_options
from pipeline.history import find_run, installed_versions, now
from pipeline.service.process import (
    CanaryRecord,
    LiveService,
    check_golden,
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
from pipeline.system.errors import ConfigError, StageError
from pipeline.system.files import digest_mapping
from pipeline.system.sources import package_sources

_PACKAGES = (
    "kserve", "httptools", "grpcio", "orjson", "numpy", "pydantic", "onnxruntime", "onnxruntime-gpu",
    "tokenizers", "jinja2",
)  # fmt: skip


@dataclass(frozen=True)
class ServiceStart:
    """What to start a process with; `stamp` is the digest of all but the bundles."""

    run: Run
    bundle: Bundle
    access: Access
    options: tuple[str, ...]
    stamp: str
    host: str
    port: int
    timeout_seconds: float
    shadow: str = ""  # folder of a bundle
    share: float = 0.0  # of the requests, if another bundle is live and gets the others; 0: all

    def is_canary(self, old: LiveService | None) -> bool:
        return bool(self.share) and old is not None and old.bundle != self.bundle.digest


def requested_start(
    run: Run, config: Config, bundle: Bundle, access: Access, shadow: Path | None, root: Path
) -> ServiceStart:
    """Return the start that the settings ask for."""
    options = (*access.options, *service_view_options(config.serve), *sampling_options(config.serve, root))
    deploy, share = config.deploy, config.rollout.canary_percent / 100
    return ServiceStart(
        run, bundle, access, options, process_stamp(options), deploy.host, deploy.port, deploy.timeout_seconds,
        str(shadow or ""), share,
    )  # fmt: skip


def reason_to_start(live: LiveService | None, request: ServiceStart) -> str:
    """Return why another process is needed; empty where the live one is what is wanted."""
    if live is None:
        return "no service is live yet"
    if (live.host, live.requested_port) != (request.host, request.port):
        return "the address has changed"
    if live.stamp != request.stamp:
        return "packages, the service's own source or its options have changed"
    if live.name != request.bundle.name:
        return f"the model is called {request.bundle.name} now"
    share = request.share if request.is_canary(live) else 0.0
    digest = request.bundle.digest
    wanted = (live.bundle, CanaryRecord(run=request.run.id, bundle=digest, share=share)) if share else (digest, None)
    if wanted != (live.bundle, live.canary):
        return "the bundle has changed" if digest != live.bundle else "the canary ends"
    return "" if live.shadow == request.shadow else "the shadow has changed"


def process_stamp(options: Sequence[str]) -> str:
    """Return a digest of what is fixed for a process; services with the same stamp differ only in bundles."""
    parts = {**package_sources("serve", "pipeline.contract", "pipeline.system"), **installed_versions(_PACKAGES)}
    return digest_mapping({**parts, "python": platform.python_version(), "options": json.dumps(list(options))})


def shadow_bundle(config: Config, run: Run, root: Path) -> Path | None:
    """Return the bundle that `serve.shadow` names: a run, or a folder of the project."""
    if not (name := config.serve.shadow):
        return None
    folder = (root / name).resolve()
    if (folder / "manifest.json").is_file():
        return folder
    source = find_run(run.runs, name)
    if not (source.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"serve.shadow: {name} has no bundle; name a run with one, or a bundle's folder")
    return source.bundle_to_serve().resolve()


def end_canary(runs: Path, live: LiveService, report: Callable[[str], None]) -> LiveService:
    """Send all requests to the other bundle again."""
    return serve_bundle(runs, live, live.run, live.bundle, report)


def finish_canary(runs: Path, live: LiveService, report: Callable[[str], None]) -> Entry:
    """Send all requests to the canary and make it the champion."""
    assert live.canary is not None
    served = serve_bundle(runs, live, live.canary.run, live.canary.bundle, report)
    run = Run(runs / served.run)
    return promote(run, run.require_bundle(served.bundle), "canary promoted")


def serve_bundle(runs: Path, live: LiveService, run_id: str, digest: str, report: Callable[[str], None]) -> LiveService:
    """Serve the bundle of a run in place of the live one, with the same options."""
    run = Run(runs / run_id)
    bundle = run.require_bundle(digest)
    place = (live.host, live.requested_port, run.config.deploy.timeout_seconds)
    request = ServiceStart(run, bundle, live.access, live.options, live.stamp, *place, live.shadow)
    return start(request, live, report)[0]


def promote(run: Run, bundle: Bundle, reason: str = "", name: str = CHAMPION, location: str | None = None) -> Entry:
    """Point a name of the registry to the run's bundle; `location` is the registry's, by default that of the run."""
    location = run.config.registry if location is None else location
    if name.partition("@")[0] == PREVIOUS:
        raise ConfigError(f"{PREVIOUS} follows from the history of {CHAMPION}; give the bundle another name")
    if not name.strip():
        raise ConfigError("--name is empty; give the bundle a name")
    entry = Entry(
        bundle=bundle.digest,
        checkpoint=bundle.manifest.ancestors.checkpoint,
        path=run.bundle_path.relative_to(run.runs).as_posix(),
    )

    def decide(registry: Registry) -> ProposedChange | None:
        last = registry.last_change(name)
        is_recorded = last is not None and (not reason or (last.reason, last.by) == (reason, current_user()))
        if last is not None and last.entry.bundle == entry.bundle and is_recorded:
            return None
        return ProposedChange(name, entry, reason or f"deployed by run {run.id}")

    publish(bundle, run.runs, location)
    return change_registry(run.runs, location, decide).names[name]


def rollback(runs: Path, location: str, name: str = CHAMPION, reason: str = "rolled back") -> Entry:
    """Point a name to the bundle it had before; a second rollback goes one bundle further back."""

    def decide(registry: Registry) -> ProposedChange:
        entry = registry.previous_entry(name)
        if entry is None:
            raise ConfigError(f"{runs}: there is no previous {name} to roll back to")
        run = Run(runs / entry.run)
        if (run.bundle_path / "manifest.json").is_file():  # else a shared registry has it, and its digest
            run.require_bundle(entry.bundle)
        return ProposedChange(name, entry, reason, rollback=True)

    return change_registry(runs, location, decide).names[name]


VERSION_DIGITS = 16  # of a bundle's digest: the name of its version
_SWITCH_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Ports:
    public: int
    grpc: int
    standby: int
    health: int


def start(request: ServiceStart, old: LiveService | None, report: Callable[[str], None]) -> tuple[LiveService, int]:
    """Start a process next to the old one, verify it, let it take over the port, and stop the old one.

    Returns the new record and the number of golden requests.
    """
    run = request.run
    public, grpc_port = choose_ports(request, old)
    if public != request.port and old is None:
        report(f"port {request.port} is taken; using {public}")
    if old is None and request.share:
        report("rollout.canary_percent: no service is live yet, so this bundle gets all requests")
    ports, log = Ports(public, grpc_port, unused_port(), unused_port()), run.path / "logs" / "service.log"
    process = spawn(argv(request, ports, old), log, service_environment())
    started = process_started(process.pid)
    try:
        golden_count = _verify(process, request, ports, log)
        report(f"{golden_count} golden requests answered as at export")
        process.send_signal(signal.SIGUSR1)
        _wait_for_switch(request, public, process.pid, log)
    except BaseException:
        stop_process(process.pid, started, grace_seconds=5)
        raise
    live = _record(request, ports, (process.pid, started), log, old)
    write_live(run.runs, live)
    if old is not None:
        stop_process(old.pid, old.process_started)
        report(f"took over from pid {old.pid} (bundle {old.bundle[:12]})")
    report(f"live at {live.url} (gRPC {live.grpc_port}, pid {live.pid})")
    return live, golden_count


def argv(request: ServiceStart, ports: Ports, old: LiveService | None) -> list[str]:
    """Return the arguments of the Python that runs the service."""
    name = request.bundle.name
    bundles = [f"{name}={request.run.bundle_path.resolve()}"]
    if old is not None and request.is_canary(old):
        old_bundle = Run(request.run.runs / old.run).require_bundle(old.bundle)
        bundles.insert(0, f"{name}={old_bundle.path.resolve()}")
    arguments = ["-m", "serve", *bundles, "--host", request.host, "--port", str(ports.public)]
    arguments += ["--grpc-port", str(ports.grpc), "--standby", str(ports.standby)]
    arguments += ["--health-port", str(ports.health), *request.options]
    arguments += ["--canary", str(request.share)] if request.is_canary(old) else []
    arguments += ["--shadow", request.shadow] if request.shadow else []
    return [*arguments, "--log-format", "text"]


def choose_ports(request: ServiceStart, old: LiveService | None) -> tuple[int, int]:
    """Keep the old service's ports if the configured address is the same, else take the next free ones."""
    if old is not None and (old.requested_port, old.host) == (request.port, request.host):
        return old.port, old.grpc_port
    port = free_port(request.host, request.port)
    return port, free_port(request.host, port + 1)


def _verify(process: subprocess.Popen[bytes], request: ServiceStart, ports: Ports, log: Path) -> int:
    """Check the golden requests on the standby port, which gets no other requests."""
    wait_until_ready(process, ports.standby, log, request.timeout_seconds)
    digest = request.bundle.digest[:VERSION_DIGITS]
    return check_golden("127.0.0.1", ports.standby, request.bundle, request.access.without_tls, digest)


def _record(
    request: ServiceStart, ports: Ports, process: tuple[int, float], log: Path, old: LiveService | None
) -> LiveService:
    run, bundle = request.run, request.bundle
    current, canary = (run.id, bundle.digest), None
    if old is not None and request.is_canary(old):
        current = (old.run, old.bundle)
        canary = CanaryRecord(run=run.id, bundle=bundle.digest, share=request.share)
    return LiveService(
        name=bundle.name,
        run=current[0],
        bundle=current[1],
        pid=process[0],
        process_started=process[1],
        host=request.host,
        port=ports.public,
        grpc_port=ports.grpc,
        health_port=ports.health,
        requested_port=request.port,
        since=now(),
        log=str(log),
        access=request.access,
        options=request.options,
        stamp=request.stamp,
        shadow=request.shadow,
        canary=canary,
    )


def _wait_for_switch(request: ServiceStart, port: int, pid: int, log: Path) -> None:
    """Wait until the new process answers on the public port."""
    host, deadline = request.host, time.monotonic() + _SWITCH_TIMEOUT_SECONDS
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
