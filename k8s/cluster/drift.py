"""The state of a service on a cluster, and its drift: how it differs from what was deployed."""

from __future__ import annotations

from dataclasses import dataclass

from k8s.cluster.cluster import Cluster
from k8s.cluster.history import History
from k8s.cluster.rollout_status import minimum_replicas, rollout_progress
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, kubectl_name
from pipeline.system.errors import PipelineError


@dataclass(frozen=True)
class DeploymentState:
    state: str
    problems: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()


def inspect_deployment(cluster: Cluster, history: History) -> DeploymentState:
    """Compare the cluster with the newest objects that were deployed to it."""
    live, version = history.live, history.current
    if live is None:
        return DeploymentState("gone" if history.versions else "nothing is deployed")
    if version is None:
        bundle = live["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "unknown")
        return DeploymentState(f"bundle {bundle[:12]} serves, which `pipe deploy` did not deploy")
    objects = history.expected_objects()
    try:
        progress = rollout_progress(live, minimum_replicas(version.workload, objects))
        problems = () if progress.done else tuple(cluster.pod_problems(version.workload))
        return DeploymentState(progress.text, problems, tuple(_find_drift(cluster, history, objects)))
    except PipelineError as error:
        return DeploymentState(f"unknown: {error}")


def _find_drift(cluster: Cluster, history: History, objects: list[Object]) -> list[str]:
    """Find changed fields by applying the objects again in a dry run."""
    drift = []
    for change in cluster.plan(objects, force=True):
        drift += [f"{change.name} is gone"] if change.new else [f"{change.name}: {field}" for field in change.fields]
    unwanted = history.unwanted_objects(cluster, objects)
    drift += [f"{kubectl_name(item)} is there, and the newest version has none" for item in unwanted]
    if history.live_canary is not None and history.canary is None:
        drift.append(f"{kubectl_name(history.live_canary)} is there, and no version of it is recorded")
    return drift
