"""`runs/cluster.json`: what serves on a cluster, what served before it, and what is tried beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.history import now
from pipeline.spec.errors import ConfigError, PipelineError
from pipeline.spec.files import write_json
from pipeline.spec.frozen import Frozen
from pipeline.spec.run import Run


class Version(Frozen):
    run: str
    bundle: str
    image: str


class Placed(Frozen):
    name: str
    context: str
    server: str
    namespace: str
    current: Version
    since: str
    previous: Version | None = None
    canary: Version | None = None
    percent: float = 0.0
    canary_in_place: bool = False  # in the very object of the stable version, as Knative has it; else beside it

    @property
    def versions(self) -> list[Version]:
        """Those that serve or may serve again."""
        return [version for version in (self.current, self.previous, self.canary) if version is not None]

    @property
    def place(self) -> list[str]:
        """Words of the configuration that lead there."""
        return ["deploy.target=kubernetes", f"deploy.context={self.context}", f"deploy.namespace={self.namespace}"]


def read_placed(runs: Path) -> Placed | None:
    path = runs / "cluster.json"
    if not path.exists():
        return None
    try:
        return Placed.model_validate_json(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path}: damaged; move it away, and `pipe deploy` writes it anew") from error


def write_placed(runs: Path, placed: Placed) -> None:
    write_json(runs / "cluster.json", placed.model_dump())


def record(run: Run, name: str, told: dict[str, Any]) -> Placed:
    """After a deployment; a bundle that merely serves again, in the same image, is no new version."""
    old = read_placed(run.runs)
    version = Version(run=run.id, bundle=told["bundle"], image=told["image"])
    where = {key: told[key] for key in ("context", "server", "namespace")}
    here = old if old is not None and (old.server, old.namespace) == (told["server"], told["namespace"]) else None
    if told.get("canary") and here is not None:
        update = {"canary": version, "percent": told["canary"], "canary_in_place": told.get("canary_in_place", False)}
        found = here.model_copy(update=update)
    elif here is not None and (here.current.bundle, here.current.image) == (version.bundle, version.image):
        found = here.model_copy(update={"current": version, "canary": None, "percent": 0.0})
    else:
        previous = here.current if here is not None else None
        found = Placed(name=name, **where, current=version, since=now(), previous=previous)
    write_placed(run.runs, found)
    return found


def without_canary(runs: Path, placed: Placed) -> Placed:
    found = placed.model_copy(update={"canary": None, "percent": 0.0})
    write_placed(runs, found)
    return found


def run_of(runs: Path, version: Version) -> Run:
    found = Run(runs / version.run)
    if not (found.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {version.run}, whose bundle {version.bundle[:12]} is to serve, is gone from {runs}")
    return found
