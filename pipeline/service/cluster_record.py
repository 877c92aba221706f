"""The record of what serves on clusters, `runs/cluster.json`, and its comparison with the clusters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.contract.settings.section import Frozen
from pipeline.history import Project, now
from pipeline.system.errors import ConfigError, PipelineError
from pipeline.system.files import write_json

if TYPE_CHECKING:
    from k8s.cluster.drift import DeploymentState

VERSIONS_KEPT = 10  # of each place, as Kubernetes keeps revisions; `pipe gc` keeps their runs


class Version(Frozen):
    run: str
    bundle: str
    image: str
    since: str = ""


class ClusterRecord(Frozen):
    """The versions that served at one place: under one name in one namespace of one cluster."""

    name: str
    context: str
    server: str
    namespace: str
    versions: tuple[Version, ...] = Field(min_length=1)  # oldest first; the last one serves
    unfinished: str = ""  # run of a deployment that may be applied and is not the current version
    canary: Version | None = None
    percent: float = 0.0
    target: str = ""  # `deploy.target` of the newest deployment; empty in older records
    canary_in_place: bool = False  # unused; older records have it

    @property
    def key(self) -> tuple[str, str, str]:
        return self.server, self.namespace, self.name

    @property
    def current(self) -> Version:
        return self.versions[-1]

    @property
    def previous(self) -> Version | None:
        return self.versions[-2] if len(self.versions) > 1 else None

    @property
    def place(self) -> str:
        return f"cluster {self.context} ({self.server}), namespace {self.namespace}"

    def needed_runs(self) -> set[str]:
        """Return the runs of the versions that serve or may serve again."""
        return {version.run for version in (*self.versions, self.canary) if version is not None}

    def place_overrides(self, config: Config) -> list[str]:
        """Return the overrides that deploy to the same place."""
        target = self.target or (config.deploy.target if config.deploy.on_cluster else "kubernetes")
        return [f"deploy.target={target}", f"deploy.context={self.context}", f"deploy.namespace={self.namespace}"]


def read_cluster_records(runs: Path) -> list[ClusterRecord]:
    """Return one record for each place, the newest deployment first."""
    path = runs / "cluster.json"
    if not path.exists():
        return []
    try:
        return TypeAdapter(list[ClusterRecord]).validate_json(raw := path.read_bytes())
    except ValidationError as invalid:
        problem = ClusterRecord.describe(raw, invalid.errors()[0], "move it away, `pipe deploy` writes a new one")
        raise PipelineError(f"{path}: {problem}") from invalid


def write_cluster_record(runs: Path, record: ClusterRecord) -> ClusterRecord:
    """Replace the record of one place."""
    others = [other for other in read_cluster_records(runs) if other.key != record.key]
    write_json(runs / "cluster.json", [item.model_dump() for item in (record, *others)])
    return record


def record_deployment(run: Run, name: str, deployed: dict[str, Any]) -> ClusterRecord:
    """Record a deployment; the same bundle in the same image is not a new version."""
    location = {key: deployed[key] for key in ("context", "server", "namespace", "target")}
    version = Version(run=run.id, bundle=deployed["bundle"], image=deployed["image"], since=now())
    new = ClusterRecord(name=name, **location, versions=(version,))
    record = next((record for record in read_cluster_records(run.runs) if record.key == new.key), None)
    if record is None:
        return write_cluster_record(run.runs, new)
    if deployed.get("canary"):
        update = {"canary": version, "percent": deployed["canary"]}
        return write_cluster_record(run.runs, record.model_copy(update={**location, **update}))
    if (record.current.bundle, record.current.image) == (version.bundle, version.image):
        versions = (*record.versions[:-1], version.model_copy(update={"since": record.current.since}))
    else:
        versions = (*record.versions, version)[-VERSIONS_KEPT:]
    return write_cluster_record(run.runs, new.model_copy(update={"versions": versions}))


def begin_deployment(run: Run, config: Config, server: str) -> None:
    """Record that a deployment is applied from now on, so that a rollback knows of it if it fails."""
    key = (server, config.deploy.namespace, config.name)
    for record in read_cluster_records(run.runs):
        if record.key == key:
            write_cluster_record(run.runs, record.model_copy(update={"unfinished": run.id}))


def end_failed_restore(runs: Path, record: ClusterRecord) -> None:
    """Let the next rollback go one version further, if the restored version was applied and failed."""
    recorded = next(other for other in read_cluster_records(runs) if other.key == record.key)
    if recorded.unfinished != record.unfinished:
        write_cluster_record(runs, recorded.model_copy(update={"unfinished": ""}))


def step_back(runs: Path, record: ClusterRecord) -> ClusterRecord:
    """Record the previous version as the current one before it is deployed; if that is interrupted, it is repeated."""
    update = {"versions": record.versions[:-1], "unfinished": record.current.run}
    return write_cluster_record(runs, record.model_copy(update=update))


def without_canary(runs: Path, record: ClusterRecord) -> ClusterRecord:
    return write_cluster_record(runs, record.model_copy(update={"canary": None, "percent": 0.0}))


def select_record(records: Sequence[ClusterRecord]) -> ClusterRecord | None:
    """Return the only record, or None without one."""
    if len(records) < 2:
        return records[0] if records else None
    places = ", or ".join(f"--context {item.context} --namespace {item.namespace} ({item.server})" for item in records)
    raise ConfigError(f"{records[0].name} is deployed at {len(records)} places; name one of them: {places}")


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
        record = self.record
        versions = {
            "current": record.current.model_dump(),
            "previous": record.previous and record.previous.model_dump(),
        }
        return {**record.model_dump(), **versions, **asdict(self.state)}

    def lines(self, options: str = "") -> list[str]:
        """Return what a person needs to know; `options` name the place where there are several."""
        record, state = self.record, self.state
        serves = f"{record.name} serves bundle {record.current.bundle[:12]} of run {record.current.run}"
        lines = [f"{record.place}: {serves} since {record.current.since}: {state.state}"]
        lines += [f"problem: {problem}" for problem in state.problems]
        lines += [f"drift (live → recorded): {drift}" for drift in state.drift]
        rollback = f"`pipe registry rollback{options}`"
        if record.canary is not None:
            lines.append(
                f"canary: about {record.percent:g} % of the requests to bundle {record.canary.bundle[:12]} of run "
                f"{record.canary.run}; `pipe registry promote{options}` or {rollback} ends it"
            )
        if record.unfinished:
            lines.append(f"the deployment of run {record.unfinished} did not end, or failed")
        if record.unfinished or any(drift.startswith("bundle ") for drift in state.drift):
            lines.append(f"{rollback} restores bundle {record.current.bundle[:12]} of run {record.current.run}")
        elif record.previous is not None and record.canary is None:
            earlier = [f"{version.bundle[:12]} of run {version.run}" for version in reversed(record.versions[:-1])]
            lines.append(f"{rollback} restores bundle {earlier[0]}")
            lines += [f"before it: bundle {version}" for version in earlier[1:]]
        return lines


def read_cluster_status(project: Project) -> list[ClusterStatus]:
    """Return the state of every place; empty where nothing was ever deployed to a cluster."""
    records = read_cluster_records(project.runs)
    if not records:
        return []
    with ThreadPoolExecutor(len(records)) as pool:  # a cluster that does not answer delays no other
        return list(pool.map(lambda record: _read_status(project, record), records))


def describe_clusters(clusters: Sequence[ClusterStatus]) -> list[str]:
    lines = []
    for status in clusters:
        place = f" --context {status.record.context} --namespace {status.record.namespace}"
        lines += status.lines(place if len(clusters) > 1 else "")
    return lines


def _read_status(project: Project, record: ClusterRecord) -> ClusterStatus:
    from k8s.cluster.drift import inspect_deployment  # slow to load

    manifests = Run(project.runs / record.current.run).output("deploy") / "manifests"
    has_canary = record.canary is not None
    state = inspect_deployment(
        record.context, record.namespace, manifests, record.current.bundle, canary=has_canary, server=record.server
    )
    return ClusterStatus(record, state)
