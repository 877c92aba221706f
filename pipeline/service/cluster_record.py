"""`runs/cluster.json`: what serves on a cluster, what served before it, and what is tried beside it.

What serves on a cluster by our record, beside what the cluster itself says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.run import Run
from pipeline.contract.settings.section import Frozen
from pipeline.history import Project, now

if TYPE_CHECKING:
    from k8s.cluster.drift import State


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


@dataclass(frozen=True)
class Told:
    placed: Placed
    state: State

    def facts(self) -> dict[str, Any]:
        return {**self.placed.model_dump(), **asdict(self.state)}

    def lines(self) -> list[str]:
        placed, state = self.placed, self.state
        where = f"cluster {placed.context} ({placed.server}), namespace {placed.namespace}"
        serves = f"{placed.name} serves bundle {placed.current.bundle[:12]} of run {placed.current.run}"
        lines = [f"{where}: {serves} since {placed.since}: {state.state}"]
        lines += [f"trouble: {trouble}" for trouble in state.troubles]
        lines += [f"drift (live → recorded): {drift}" for drift in state.drift]
        if placed.canary is not None:
            lines.append(
                f"canary: about {placed.percent:g} % of the requests to bundle {placed.canary.bundle[:12]} of run "
                f"{placed.canary.run}; `pipe promote` or `pipe rollback` ends it"
            )
        if any(drift.startswith("bundle ") for drift in state.drift):
            lines.append(f"`pipe rollback` puts bundle {placed.current.bundle[:12]} of run {placed.current.run} back")
        elif placed.previous is not None and placed.canary is None:
            lines.append(
                f"`pipe rollback` goes back to bundle {placed.previous.bundle[:12]} of run {placed.previous.run}"
            )
        return lines


def told_of_cluster(project: Project) -> Told | None:
    """None where nothing was ever deployed to one."""
    placed = read_placed(project.runs)
    if placed is None:
        return None
    from k8s.cluster.drift import look

    version = placed.canary if placed.canary and placed.canary_in_place else placed.current
    manifests = Run(project.runs / version.run).output("deploy") / "manifests"
    tried = placed.canary is not None
    return Told(placed, look(placed.context, placed.namespace, manifests, version.bundle, canary=tried))
