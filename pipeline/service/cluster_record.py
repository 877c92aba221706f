"""The record of what serves on a cluster, `runs/cluster.json`, and its comparison with the cluster itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.run import Run
from pipeline.contract.settings.section import Frozen
from pipeline.history import Project, now

if TYPE_CHECKING:
    from k8s.cluster.drift import DeploymentState


class Version(Frozen):
    run: str
    bundle: str
    image: str


class ClusterRecord(Frozen):
    name: str
    context: str
    server: str
    namespace: str
    current: Version
    since: str
    previous: Version | None = None
    canary: Version | None = None
    percent: float = 0.0
    target: str = ""  # `deploy.target` of the newest deployment; empty in older records
    canary_in_place: bool = False  # in the object of the stable version, as with Knative; else in its own objects

    @property
    def versions(self) -> list[Version]:
        """Return the versions that serve or may serve again."""
        return [version for version in (self.current, self.previous, self.canary) if version is not None]

    def place(self, config: Config) -> list[str]:
        """Return the overrides that deploy to the same place."""
        target = self.target or (config.deploy.target if config.deploy.on_cluster else "kubernetes")
        return [
            f"deploy.target={target}",
            f"deploy.context={self.context}",
            f"deploy.namespace={self.namespace}",
        ]


def read_cluster_record(runs: Path) -> ClusterRecord | None:
    path = runs / "cluster.json"
    if not path.exists():
        return None
    try:
        return ClusterRecord.model_validate_json(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path}: damaged; to fix it: move it away, `pipe deploy` writes a new one") from error


def write_cluster_record(runs: Path, record: ClusterRecord) -> None:
    write_json(runs / "cluster.json", record.model_dump())


def record_deployment(run: Run, name: str, deployed: dict[str, Any]) -> ClusterRecord:
    """Record a deployment; the same bundle in the same image is not a new version."""
    recorded = read_cluster_record(run.runs)
    version = Version(run=run.id, bundle=deployed["bundle"], image=deployed["image"])
    location = {key: deployed[key] for key in ("context", "server", "namespace", "target")}
    same_place = (
        recorded
        if recorded and (recorded.server, recorded.namespace) == (deployed["server"], deployed["namespace"])
        else None
    )
    if deployed.get("canary") and same_place is not None:
        update = {
            "target": deployed["target"],
            "canary": version,
            "percent": deployed["canary"],
            "canary_in_place": deployed.get("canary_in_place", False),
        }
        updated = same_place.model_copy(update=update)
    elif same_place is not None and (same_place.current.bundle, same_place.current.image) == (
        version.bundle,
        version.image,
    ):
        updated = same_place.model_copy(update={**location, "current": version, "canary": None, "percent": 0.0})
    else:
        previous = same_place.current if same_place is not None else None
        updated = ClusterRecord(name=name, **location, current=version, since=now(), previous=previous)
    write_cluster_record(run.runs, updated)
    return updated


def without_canary(runs: Path, record: ClusterRecord) -> ClusterRecord:
    updated = record.model_copy(update={"canary": None, "percent": 0.0})
    write_cluster_record(runs, updated)
    return updated


def run_of_version(runs: Path, version: Version) -> Run:
    run = Run(runs / version.run)
    if not (run.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {version.run}, whose bundle {version.bundle[:12]} is to be served, is not in {runs}")
    run.require_bundle(version.bundle)
    return run


@dataclass(frozen=True)
class ClusterStatus:
    record: ClusterRecord
    state: DeploymentState

    def facts(self) -> dict[str, Any]:
        return {**self.record.model_dump(), **asdict(self.state)}

    def lines(self) -> list[str]:
        record, state = self.record, self.state
        location = f"cluster {record.context} ({record.server}), namespace {record.namespace}"
        serves = f"{record.name} serves bundle {record.current.bundle[:12]} of run {record.current.run}"
        lines = [f"{location}: {serves} since {record.since}: {state.state}"]
        lines += [f"problem: {problem}" for problem in state.problems]
        lines += [f"drift (live → recorded): {drift}" for drift in state.drift]
        if record.canary is not None:
            lines.append(
                f"canary: about {record.percent:g} % of the requests to bundle {record.canary.bundle[:12]} of run "
                f"{record.canary.run}; `pipe registry promote` or `pipe registry rollback` ends it"
            )
        if any(drift.startswith("bundle ") for drift in state.drift):
            lines.append(
                f"`pipe registry rollback` restores bundle {record.current.bundle[:12]} of run {record.current.run}"
            )
        elif record.previous is not None and record.canary is None:
            lines.append(
                f"`pipe registry rollback` restores bundle {record.previous.bundle[:12]} of run {record.previous.run}"
            )
        return lines


def read_cluster_status(project: Project) -> ClusterStatus | None:
    """Return None where nothing was ever deployed to a cluster."""
    record = read_cluster_record(project.runs)
    if record is None:
        return None
    from k8s.cluster.drift import inspect_deployment

    version = record.canary if record.canary and record.canary_in_place else record.current
    manifests = Run(project.runs / version.run).output("deploy") / "manifests"
    has_canary = record.canary is not None
    state = inspect_deployment(record.context, record.namespace, manifests, version.bundle, canary=has_canary)
    return ClusterStatus(record, state)
