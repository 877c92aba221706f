"""The places that a project deploys to on clusters, each a cluster, a namespace and a name, and what serves there.

What serves is recorded on the clusters themselves; here are the settings that lead there, and the registry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.contract.bundle import OVERRIDDEN, Bundle
from pipeline.contract.config import Config, override_config
from pipeline.contract.registry import ProposedChange, champion_bundle, champion_name, change_registry, read_registry
from pipeline.contract.run import Run
from pipeline.history import Project, load_history
from pipeline.service.rollout import promote
from pipeline.system.errors import ConfigError, PipelineError

if TYPE_CHECKING:
    from k8s.cluster.history import Version


def find_places(project: Project) -> list[Config]:
    """Return the settings of each place: that of pipe.yaml first, then those that runs were deployed to."""
    config = project.config()
    places = {champion_name(config): config} if _is_cluster(config) else {}
    for run, body in load_history(project.runs):
        if "deploy" in body.steps and _is_cluster(earlier := run.config):
            places.setdefault(champion_name(earlier), _at(config, earlier))
    return list(places.values())


def _is_cluster(config: Config) -> bool:
    return config.deploy.on_cluster and not config.deploy.render


def _at(config: Config, earlier: Config) -> Config:
    """Return the project's settings for the place of an earlier deployment."""
    deploy = {name: getattr(earlier.deploy, name) for name in ("target", "context", "namespace")}
    return override_config(config, [f"name={earlier.name}", *(f"deploy.{name}={deploy[name]}" for name in deploy)])


def choose_place(project: Project, context: str | None, namespace: str | None) -> Config | None:
    """Return the place that is named, or else that of pipe.yaml, or the only one; None without one."""
    places = find_places(project)
    if context is not None or namespace is not None:
        config = places[0] if places else override_config(project.config(), ["deploy.target=kubernetes"])
        named = {"context": context, "namespace": namespace}
        return override_config(
            config, [f"deploy.{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
        )
    if len(places) < 2 or _is_cluster(project.config()):
        return places[0] if places else None
    listed = ", or".join(map(_options, places))
    raise ConfigError(f"{project.config().name} is deployed at {len(places)} places; name one of them:{listed}")


def find_bundle(project: Project, version: Version) -> Bundle | None:
    """Return the bundle of a version from its run or the registry; None if this machine cannot reach it."""
    run = Run(project.runs / version.run)
    location = project.config().registry
    try:
        if (run.bundle_path / "manifest.json").is_file():
            return run.require_bundle(version.bundle)
        entry = read_registry(project.runs, location).find_entry(version.bundle)
        return champion_bundle(entry, project.runs, location) if entry else None
    except PipelineError:
        return None


def crown(project: Project, place: Config, version: Version, reason: str, rollback: bool = False) -> str:
    """Make the version that serves at a place its champion; return a sentence about it."""
    name, location, bundle = champion_name(place), project.config().registry, find_bundle(project, version)
    entry = read_registry(project.runs, location).find_entry(version.bundle)
    if bundle is not None and bundle.manifest.verdict == OVERRIDDEN:
        return f"{name} stays as it is, since the gate was overridden"
    if entry is not None:
        change = ProposedChange(name, entry, reason, rollback)
        change_registry(project.runs, location, lambda now: None if now.names.get(name) == entry else change)
    elif bundle is not None:
        promote(Run(project.runs / version.run), bundle, reason, name, location)
    else:
        return f"{name} stays as it is, since run {version.run} is not here"
    return f"{name} is bundle {version.bundle[:12]}"


@dataclass(frozen=True)
class PlaceStatus:
    place: Config
    context: str
    server: str
    state: Mapping[str, Any]  # state, problems and drift
    current: Version | None = None
    canary: Version | None = None
    unfinished: Version | None = None
    earlier: tuple[Version, ...] = ()  # that a rollback restores, one after the other

    def facts(self) -> dict[str, Any]:
        deploy = self.place.deploy
        versions = {name: getattr(self, name) for name in ("current", "canary", "unfinished")}
        return {
            "name": self.place.name,
            "context": deploy.context,
            "server": self.server,
            "namespace": deploy.namespace,
            "target": deploy.target,
            **self.state,
            **{name: version and version.facts() for name, version in versions.items()},
            "previous": self.earlier[0].facts() if self.earlier else None,
            "versions": [version.facts() for version in self.earlier],
        }

    def lines(self, options: str = "") -> list[str]:
        """Return what a person needs to know; `options` name the place where there are several."""
        deploy, rollback = self.place.deploy, f"`pipe registry rollback{options}`"
        serves = f"{self.place.name} serves {self.current.title} since {self.current.since}: " if self.current else ""
        where = f"cluster {self.context} ({self.server})" if self.server else f"cluster {self.context}".rstrip()
        lines = [f"{where}, namespace {deploy.namespace}: {serves}{self.state['state']}"]
        lines += [f"problem: {problem}" for problem in self.state["problems"]]
        lines += [f"drift (live → recorded): {drift}" for drift in self.state["drift"]]
        if self.canary is not None:
            lines.append(f"canary: {self.canary.title}; `pipe registry promote{options}` or {rollback} ends it")
        if self.unfinished is not None:
            lines.append(f"the deployment of {self.unfinished.title} did not end, or failed")
        if self.earlier and self.canary is None:
            lines.append(f"{rollback} restores {self.earlier[0].title}")
            lines += [f"before it: {version.title}" for version in self.earlier[1:]]
        return lines


def read_places(project: Project) -> list[PlaceStatus]:
    """Return the state of every place; empty where nothing is deployed to a cluster."""
    places = find_places(project)
    if not places:
        return []
    with ThreadPoolExecutor(len(places)) as pool:  # a cluster that does not answer delays no other
        return list(pool.map(_read_place, places))


def describe_places(places: Sequence[PlaceStatus]) -> list[str]:
    lines = []
    for status in places:
        lines += status.lines(_options(status.place) if len(places) > 1 else "")
    return lines


def _options(place: Config) -> str:
    context = f" --context {place.deploy.context}" if place.deploy.context else ""
    return f"{context} --namespace {place.deploy.namespace}"


def _read_place(place: Config) -> PlaceStatus:
    from k8s.cluster.cluster import Cluster  # slow to load
    from k8s.cluster.drift import inspect_deployment
    from k8s.deploy import read_versions

    try:
        cluster = Cluster.connect(place.deploy.context, place.deploy.namespace)
        history = read_versions(cluster, place)
        state = vars(inspect_deployment(cluster, history))
    except PipelineError as error:
        return PlaceStatus(place, place.deploy.context, "", {"state": f"unknown: {error}", "problems": (), "drift": ()})
    server = cluster.connection.server
    return PlaceStatus(
        place, cluster.context, server, state, history.current, history.canary, history.unfinished, history.restorable()
    )
