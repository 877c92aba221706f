"""What serves on a cluster by our record, beside what the cluster itself says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.placed import Placed, read_placed
from pipeline.project import Project
from pipeline.spec.run import Run

if TYPE_CHECKING:  # the command line loads without the manifests
    from k8s.drift import State


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
    from k8s.drift import look

    version = placed.canary if placed.canary and placed.canary_in_place else placed.current
    manifests = Run(project.runs / version.run).output("deploy") / "manifests"
    tried = placed.canary is not None
    return Told(placed, look(placed.context, placed.namespace, manifests, version.bundle, canary=tried))
