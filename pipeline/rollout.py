"""How a bundle gets into the service that runs: beside the old one in its process, or with a process of its own."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pipeline.admin import Admin
from pipeline.champion import promote
from pipeline.history import find_run, installed_versions, now
from pipeline.service import Live, Trial, write_live
from pipeline.smoke import check_golden
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import Entry
from pipeline.spec.run import Run
from pipeline.spec.share import share_of
from pipeline.spec.sources import house_sources

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
