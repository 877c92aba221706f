"""How a bundle gets into the service that runs: beside the old one in its process, or with a process of its own.

Telling the running service what to serve, over the admin interface it was started with.

Which bundle candidates have to beat: promoted when it serves, or by hand; the one before stays known.
"""

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
from pipeline.contract.registry import CHAMPION, PREVIOUS, Entry, Registry, Wanted, change_registry
from pipeline.contract.run import Run
from pipeline.contract.settings.section import share_of
from pipeline.contract.sources import house_sources
from pipeline.history import find_run, installed_versions, now
from pipeline.service.process import Live, Trial, check_golden, write_live

Way = Literal["start", "take over", "swap"]

_PACKAGES = (
    "kserve", "uvicorn", "grpcio", "orjson", "numpy", "pydantic", "onnxruntime", "onnxruntime-gpu",
    "tokenizers", "jinja2",
)  # fmt: skip


def decide(live: Live | None, config: Config, bundle: Bundle, stamp: str) -> tuple[Way, str]:
    """A bundle alone is swapped in; whatever belongs to the process needs another one, which takes the port over."""
    if live is None:
        return "start", "nothing serves yet"
    deploy = config.deploy
    if (live.host, live.asked_port) != (deploy.host, deploy.port) or deploy.grpc_port not in (0, live.grpc_port):
        return "take over", "another address is asked for"
    if not live.admin_port:
        return "take over", "the one that serves has no admin interface"
    if live.stamp != stamp:
        return "take over", "packages, the service's own source or its options have changed"
    if live.name != bundle.name:
        return "take over", f"the model is called {bundle.name} now"
    if bundle.signature.limits.max_body_bytes > live.max_body_bytes:
        return "take over", "its requests may be larger than this process was started for"
    return "swap", "only the bundle is another"


def stamp_of(options: Sequence[str]) -> str:
    """Of all that a process keeps for its life: two services with one stamp differ in their bundles alone."""
    parts = {**house_sources("serve"), **installed_versions(_PACKAGES)}
    return digest_mapping({**parts, "python": platform.python_version(), "options": json.dumps(list(options))})


def canary_share(config: Config) -> float:
    """0 without a canary."""
    return share_of(config.serve.canary) if config.serve.canary else 0.0


def shadow_bundle(config: Config, run: Run, root: Path) -> Path | None:
    """`serve.shadow` is a run, or a folder below the project's root."""
    if not (name := config.serve.shadow):
        return None
    folder = (root / name).resolve()
    path = folder if (folder / "manifest.json").is_file() else find_run(run.runs, name).bundle_path
    if not (path / "manifest.json").is_file():
        raise ConfigError(f"serve.shadow: {name} has no bundle; name a run with one, or a bundle's folder")
    return path.resolve()


def swap(run: Run, bundle: Bundle, live: Live, shadow: Path | None, say: Callable[[str], None]) -> tuple[Live, int]:
    """Load beside the old bundle, prove, switch. Whatever fails before the switch leaves the old one serving."""
    config = run.config
    _prove_here(bundle)
    admin = Admin(live, config.deploy.timeout_seconds)
    version = admin.load(run.bundle_path)
    try:
        asked = check_golden(live.host, live.port, bundle, live.access, version)
        admin.shadow(shadow, config.serve.shadow_share)
    except BaseException:
        admin.forget()
        raise
    say(f"{asked} golden requests answered as at export")
    share = canary_share(config) if bundle.digest != live.bundle else 0.0
    if share:
        admin.canary(version, share)
        found = live.model_copy(update={"canary": Trial(run=run.id, bundle=bundle.digest, share=share)})
    else:
        admin.switch(version)
        since = live.since if live.bundle == bundle.digest else now()
        update = {"run": run.id, "bundle": bundle.digest, "since": since, "canary": None}
        found = live.model_copy(update=update)
    write_live(run.runs, found)
    return found, asked


def _prove_here(bundle: Bundle) -> None:
    """A bundle that takes its process down with it takes this one, not the service."""
    from serve.runtime.selfcheck import check  # onnxruntime is slow to load
    from serve.runtime.session import Session

    check(bundle, Session(bundle, "cpu"))


def end_canary(runs: Path, live: Live) -> Live:
    """All requests go back to who serves the rest of them."""
    assert live.canary is not None
    admin = Admin(live)
    if version := admin.version_of(live.canary.bundle):
        admin.canary(version, 0)
    found = live.model_copy(update={"canary": None})
    write_live(runs, found)
    return found


def finish_canary(runs: Path, live: Live) -> Entry:
    """All requests go to the canary, and it is what candidates have to beat."""
    assert live.canary is not None
    run = Run(runs / live.canary.run)
    admin = Admin(live, run.config.deploy.timeout_seconds)
    admin.switch(admin.version_of(live.canary.bundle) or admin.load(run.bundle_path))
    update = {"run": run.id, "bundle": live.canary.bundle, "since": now(), "canary": None}
    write_live(runs, live.model_copy(update=update))
    return promote(run, run.bundle(), "canary promoted")


def go_back(runs: Path, live: Live, entry: Entry) -> bool:
    """Serve the champion of before at once, where it is loaded still."""
    if not live.admin_port or not (version := Admin(live).version_of(entry.bundle)):
        return False
    Admin(live).switch(version)
    update = {"run": entry.run, "bundle": entry.bundle, "since": now(), "canary": None}
    write_live(runs, live.model_copy(update=update))
    return True


_ADMIN_HOST = "127.0.0.1"  # and nowhere else
_QUICK_SECONDS = 10.0


class Admin:
    """Every refusal is a StageError with the service's own sentence."""

    def __init__(self, live: Live, load_seconds: float = 120) -> None:
        self._live, self._load_seconds = live, load_seconds

    def answers(self) -> bool:
        """Whether there is anybody to tell something."""
        try:
            self.status()
        except StageError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """Of the one model that `pipe deploy` keeps."""
        found: dict[str, Any] = self._ask("GET", "/")["models"][self._live.name]
        return found

    def version_of(self, digest: str) -> str:
        """The version made of this bundle; empty where none is loaded."""
        versions = self.status()["versions"].items()
        return next((version for version, one in versions if one["bundle"] == digest), "")

    def load(self, bundle: Path) -> str:
        """Proven beside what serves; returns its version. Nobody meets it yet."""
        return str(self._post("/load", bundle=str(bundle.resolve()))["version"])

    def switch(self, version: str) -> None:
        self._post("/switch", version=version)

    def canary(self, version: str, share: float) -> None:
        self._post("/canary", version=version, share=share)

    def shadow(self, bundle: Path | None, share: float = 1.0) -> None:
        self._post("/shadow", share=share, **({} if bundle is None else {"bundle": str(bundle.resolve())}))

    def forget(self) -> None:
        """What was loaded and gets no requests."""
        self._post("/forget")

    def _post(self, path: str, **fields: Any) -> Any:
        return self._ask("POST", path, {"model": self._live.name, **fields})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        live = self._live
        seconds = self._load_seconds if path in ("/load", "/shadow") else _QUICK_SECONDS
        connection = http.client.HTTPConnection(_ADMIN_HOST, live.admin_port, timeout=seconds)
        try:
            headers = {"authorization": f"Bearer {Path(live.token).read_text().strip()}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StageError(f"the service (pid {live.pid}) does not answer on its admin port: {error}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise StageError(str(found.get("error", found)))
        return found


def promote(run: Run, bundle: Bundle, reason: str = "", name: str = CHAMPION, word: str | None = None) -> Entry:
    """What serves is what the next candidate has to beat. `word` names the registry, if not the run's own."""
    from pipeline.contract.registry import publish

    word = run.config.registry if word is None else word
    if name == PREVIOUS:
        raise ConfigError(f"{PREVIOUS} follows from the history of {CHAMPION}; give the bundle another name")
    if not name.strip():
        raise ConfigError("--name is empty; it stays in the history for ever")
    entry = Entry(
        bundle=bundle.digest,
        checkpoint=bundle.manifest.ancestors.checkpoint,
        path=run.bundle_path.relative_to(run.runs).as_posix(),
    )

    def decide(registry: Registry) -> Wanted | None:
        current = registry.names.get(name)
        if current is not None and current.bundle == entry.bundle:  # the same bundle in a later run changes nothing
            return None
        return Wanted(name, entry, reason or f"deployed by run {run.id}")

    publish(bundle, run.runs, word)
    return change_registry(run.runs, word, decide).names[name]


def rollback(runs: Path, word: str, name: str = CHAMPION, reason: str = "rolled back") -> Entry:
    """What a name meant before it means again, and the other way round."""

    def decide(registry: Registry) -> Wanted:
        entry = registry.before(name)
        if entry is None:
            raise ConfigError(f"{runs}: there is no previous {name} to go back to")
        return Wanted(name, entry, reason)

    return change_registry(runs, word, decide).names[name]
