"""Roll out a bundle to the local service: swap it in, run a canary, go back; and promote it in the registry."""

from __future__ import annotations

import http.client
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError, StageError
from pipeline.contract.files import digest_mapping
from pipeline.contract.registry import CHAMPION, PREVIOUS, Entry, ProposedChange, Registry, change_registry
from pipeline.contract.run import Run
from pipeline.contract.sources import package_sources
from pipeline.history import find_run, installed_versions, now
from pipeline.service.process import Canary, LiveService, check_golden, write_live

Way = Literal["start", "take over", "swap"]

_PACKAGES = (
    "kserve", "uvicorn", "grpcio", "orjson", "numpy", "pydantic", "onnxruntime", "onnxruntime-gpu",
    "tokenizers", "jinja2",
)  # fmt: skip


def choose_rollout(live: LiveService | None, config: Config, bundle: Bundle, stamp: str) -> tuple[Way, str]:
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
    if live.stamp != stamp:
        return "take over", "packages, the service's own source or its options have changed"
    if live.name != bundle.name:
        return "take over", f"the model is called {bundle.name} now"
    if bundle.signature.limits.max_body_bytes > live.max_body_bytes:
        return "take over", "its requests may be larger than the live process accepts"
    return "swap", "only the bundle has changed"


def process_stamp(options: Sequence[str]) -> str:
    """Return a digest of what is fixed for a process; services with the same stamp differ only in bundles."""
    parts = {**package_sources("serve"), **installed_versions(_PACKAGES)}
    return digest_mapping({**parts, "python": platform.python_version(), "options": json.dumps(list(options))})


def canary_share(config: Config) -> float:
    """Return the fraction of requests for a canary; 0 without one."""
    return config.rollout.canary_percent / 100


def shadow_bundle(config: Config, run: Run, root: Path) -> Path | None:
    """Return the bundle that `serve.shadow` names: a run, or a folder of the project."""
    if not (name := config.serve.shadow):
        return None
    folder = (root / name).resolve()
    path = folder if (folder / "manifest.json").is_file() else find_run(run.runs, name).bundle_path
    if not (path / "manifest.json").is_file():
        raise ConfigError(f"serve.shadow: {name} has no bundle; name a run with one, or a bundle's folder")
    return path.resolve()


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
        updated = live.model_copy(update={"canary": Canary(run=run.id, bundle=bundle.digest, share=share)})
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
    admin = AdminClient(live, run.config.deploy.timeout_seconds)
    admin.switch(admin.version_of(live.canary.bundle) or admin.load(run.bundle_path))
    update = {"run": run.id, "bundle": live.canary.bundle, "since": now(), "canary": None}
    write_live(runs, live.model_copy(update=update))
    return promote(run, run.bundle(), "canary promoted")


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
    """Point a name to the bundle it had before; a second rollback undoes the first."""

    def decide(registry: Registry) -> ProposedChange:
        entry = registry.before(name)
        if entry is None:
            raise ConfigError(f"{runs}: there is no previous {name} to roll back to")
        return ProposedChange(name, entry, reason)

    return change_registry(runs, location, decide).names[name]
