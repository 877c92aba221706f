"""Start the local service and roll out bundles to it: swap, canary, rollback, and promotion in the registry.

A new process is verified on a standby port before it takes over the public one.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.registry import CHAMPION, PREVIOUS, Entry, ProposedChange, Registry, change_registry
from pipeline.contract.run import Run
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Deploy
from pipeline.history import find_run, installed_versions, now
from pipeline.service.process import (
    CanaryRecord,
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
from pipeline.system.errors import ConfigError, StageError
from pipeline.system.files import digest_mapping
from pipeline.system.sources import package_sources

RolloutMethod = Literal["start", "take over", "swap"]

_PACKAGES = (
    "kserve", "uvicorn", "grpcio", "orjson", "numpy", "pydantic", "onnxruntime", "onnxruntime-gpu",
    "tokenizers", "jinja2",
)  # fmt: skip


def choose_rollout(live: LiveService | None, config: Config, bundle: Bundle, stamp: str) -> tuple[RolloutMethod, str]:
    """Choose between a swap in the running process and a new process, and return the reason.

    A bundle alone can be swapped; anything else that differs belongs to the process.
    """
    if live is None:
        return "start", "no service is live yet"
    deploy = config.deploy
    if (live.host, live.requested_port) != (deploy.host, deploy.port):
        return "take over", "the address has changed"
    if not live.admin_port:
        return "take over", "the live service has no admin interface"
    if config.serve.workers != 1:
        return "take over", "several workers load their bundles at the start"
    if live.stamp != stamp:
        return "take over", "packages, the service's own source or its options have changed"
    if live.name != bundle.name:
        return "take over", f"the model is called {bundle.name} now"
    if bundle.signature.limits.max_body_bytes > live.max_body_bytes:
        return "take over", "its requests may be larger than the live process accepts"
    return "swap", "only the bundle has changed"


def process_stamp(options: Sequence[str]) -> str:
    """Return a digest of what is fixed for a process; services with the same stamp differ only in bundles."""
    parts = {**package_sources("serve", "pipeline.contract", "pipeline.system"), **installed_versions(_PACKAGES)}
    return digest_mapping({**parts, "python": platform.python_version(), "options": json.dumps(list(options))})


def canary_share(config: Config) -> float:
    """Return the fraction of requests for a canary; 0 without one."""
    return config.rollout.canary_percent / 100


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


def swap_bundle(
    run: Run, bundle: Bundle, live: LiveService, shadow: Path | None, report: Callable[[str], None]
) -> tuple[LiveService, int]:
    """Load the bundle next to the old one, verify it, then switch; a failure before that leaves the old one serving.

    Returns the new record and the number of golden requests.
    """
    config = run.config
    _verify_here(bundle)
    admin = AdminClient(live, config.deploy.timeout_seconds)
    version = admin.load(run.bundle_path)
    try:
        golden_count = check_golden(live.host, live.port, bundle, live.access, version)
        admin.shadow(shadow)
    except BaseException:
        admin.forget()
        raise
    report(f"{golden_count} golden requests answered as at export")
    share = canary_share(config) if bundle.digest != live.bundle else 0.0
    if share:
        admin.canary(version, share)
        updated = live.model_copy(update={"canary": CanaryRecord(run=run.id, bundle=bundle.digest, share=share)})
    else:
        admin.switch(version)
        since = live.since if live.bundle == bundle.digest else now()
        update = {"run": run.id, "bundle": bundle.digest, "since": since, "canary": None}
        updated = live.model_copy(update=update)
    write_live(run.runs, updated)
    return updated, golden_count


def _verify_here(bundle: Bundle) -> None:
    """Answer the golden requests in this process first: a bundle that crashes must not crash the service."""
    from serve.runtime.selfcheck import check_golden_requests  # onnxruntime is slow to load
    from serve.runtime.session import Session

    check_golden_requests(bundle, Session(bundle, "cpu"))


def end_canary(runs: Path, live: LiveService) -> LiveService:
    """Send all requests to the other bundle again."""
    assert live.canary is not None
    admin = AdminClient(live)
    if version := admin.version_of(live.canary.bundle):
        admin.canary(version, 0)
    updated = live.model_copy(update={"canary": None})
    write_live(runs, updated)
    return updated


def finish_canary(runs: Path, live: LiveService) -> Entry:
    """Send all requests to the canary and make it the champion."""
    assert live.canary is not None
    run = Run(runs / live.canary.run)
    bundle = run.require_bundle(live.canary.bundle)
    admin = AdminClient(live, run.config.deploy.timeout_seconds)
    admin.switch(admin.version_of(bundle.digest) or admin.load(bundle.path))
    update = {"run": run.id, "bundle": live.canary.bundle, "since": now(), "canary": None}
    write_live(runs, live.model_copy(update=update))
    return promote(run, bundle, "canary promoted")


def serve_previous(runs: Path, live: LiveService, entry: Entry) -> bool:
    """Switch back to an earlier bundle if the service still has it loaded; return whether it had."""
    if not live.admin_port or not (version := AdminClient(live).version_of(entry.bundle)):
        return False
    AdminClient(live).switch(version)
    update = {"run": entry.run, "bundle": entry.bundle, "since": now(), "canary": None}
    write_live(runs, live.model_copy(update=update))
    return True


_ADMIN_HOST = "127.0.0.1"
_ADMIN_TIMEOUT_SECONDS = 10.0


class AdminClient:
    """Client of the live service's admin interface; its errors are raised as StageErrors."""

    def __init__(self, live: LiveService, load_seconds: float = 120) -> None:
        self._live, self._load_seconds = live, load_seconds

    def answers(self) -> bool:
        try:
            self.status()
        except StageError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._send("GET", "/")["models"][self._live.name]
        return status

    def version_of(self, digest: str) -> str:
        """Return the loaded version of a bundle, or an empty string."""
        versions = self.status()["versions"].items()
        return next((version for version, facts in versions if facts["bundle"] == digest), "")

    def load(self, bundle: Path) -> str:
        """Load and verify a bundle, which gets no requests yet; return its version."""
        return str(self._post("/load", bundle=str(bundle.resolve()))["version"])

    def switch(self, version: str) -> None:
        self._post("/switch", version=version)

    def canary(self, version: str, share: float) -> None:
        self._post("/canary", version=version, share=share)

    def shadow(self, bundle: Path | None, share: float = 1.0) -> None:
        self._post("/shadow", share=share, **({} if bundle is None else {"bundle": str(bundle.resolve())}))

    def forget(self) -> None:
        """Unload the bundles that get no requests."""
        self._post("/forget")

    def _post(self, path: str, **fields: Any) -> Any:
        return self._send("POST", path, {"model": self._live.name, **fields})

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        live = self._live
        seconds = self._load_seconds if path in ("/load", "/shadow") else _ADMIN_TIMEOUT_SECONDS
        connection = http.client.HTTPConnection(_ADMIN_HOST, live.admin_port, timeout=seconds)
        try:
            headers = {"authorization": f"Bearer {Path(live.token).read_text().strip()}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StageError(f"the service (pid {live.pid}) does not answer on its admin port: {error}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise StageError(str(answer.get("error", answer)))
        return answer


def promote(run: Run, bundle: Bundle, reason: str = "", name: str = CHAMPION, location: str | None = None) -> Entry:
    """Point a name of the registry to the run's bundle; `location` is the registry's, by default that of the run."""
    from pipeline.contract.registry import publish

    location = run.config.registry if location is None else location
    if name == PREVIOUS:
        raise ConfigError(f"{PREVIOUS} follows from the history of {CHAMPION}; give the bundle another name")
    if not name.strip():
        raise ConfigError("--name is empty; give the bundle a name")
    entry = Entry(
        bundle=bundle.digest,
        checkpoint=bundle.manifest.ancestors.checkpoint,
        path=run.bundle_path.relative_to(run.runs).as_posix(),
    )

    def decide(registry: Registry) -> ProposedChange | None:
        current = registry.names.get(name)
        if current is not None and current.bundle == entry.bundle:
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
        old_bundle = Run(request.run.runs / old.run).require_bundle(old.bundle)
        bundles.insert(0, f"{name}={old_bundle.path.resolve()}")
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
        canary=CanaryRecord(run=run.id, bundle=bundle.digest, share=share) if share else None,
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
