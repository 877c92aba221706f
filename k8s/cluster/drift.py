"""The state of a deployment on a cluster, and its drift: how it differs from what was applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from k8s.cluster.canary import canary_name
from k8s.cluster.cluster import Cluster
from k8s.cluster.rollout_status import minimum_replicas, rollout_progress
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, WORKLOAD_KINDS, kubectl_name
from pipeline.system.errors import PipelineError


@dataclass(frozen=True)
class DeploymentState:
    state: str
    problems: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()


def inspect_deployment(
    context: str, namespace: str, manifests: Path, bundle: str, canary: bool = False, server: str = ""
) -> DeploymentState:
    """Compare the cluster with the manifests that were applied; `bundle`, `canary` and `server` were recorded."""
    objects = read_manifests(manifests)
    workload = _find_workload(objects)
    if workload is None:
        return DeploymentState(f"its manifests are missing from {manifests}")
    try:
        cluster = Cluster.connect(context, namespace)
        if server not in ("", cluster.connection.server):
            return DeploymentState(f"unknown: the context {context} is that of {cluster.connection.server} now")
        live = cluster.read(workload)
        if live is None:
            return DeploymentState("gone", drift=(f"{kubectl_name(workload)} is not on the cluster any more",))
        progress = rollout_progress(live, minimum_replicas(workload, objects))
        problems = () if progress.done else tuple(cluster.pod_problems(workload))
        drift = _find_drift(cluster, objects, live, bundle)
        if not canary and (unrecorded := _read_canary(cluster, workload)):
            drift.append(f"{kubectl_name(unrecorded)} exists, and no canary is recorded")
        return DeploymentState(progress.text, problems, tuple(drift))
    except PipelineError as error:
        return DeploymentState(f"unknown: {error}")


@dataclass(frozen=True)
class LiveVersion:
    """What a cluster serves now, from its objects alone."""

    bundle: str  # digest; empty if nothing is deployed
    canary: bool  # whether there is a canary's Deployment


def read_live_version(context: str, namespace: str, manifests: Path) -> LiveVersion:
    workload = _find_workload(read_manifests(manifests))
    if workload is None:
        return LiveVersion("", False)
    cluster = Cluster.connect(context, namespace)
    live = cluster.read(workload)
    bundle = live["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "") if live else ""
    return LiveVersion(bundle, _read_canary(cluster, workload) is not None)


def read_manifests(folder: Path) -> list[Object]:
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    return [document for document in documents if document and document["kind"] != "Kustomization"]


def _find_workload(objects: Sequence[Object]) -> Object | None:
    return next((item for item in objects if item["kind"] in WORKLOAD_KINDS), None)


def _read_canary(cluster: Cluster, workload: Object) -> Object | None:
    """Return the canary's Deployment; one that is not recorded is left over from a `pipe` that was killed."""
    if workload["kind"] != "Deployment":
        return None
    name = canary_name(workload["metadata"]["name"])
    return cluster.read({**workload, "metadata": {"name": name}})


def _find_drift(cluster: Cluster, objects: Sequence[Object], live: Object, bundle: str) -> list[str]:
    """Find changed fields by applying the manifests again in a dry run."""
    live_bundle = live["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "none")
    drift = []
    if live_bundle != bundle:
        drift.append(f"bundle {live_bundle[:12]} serves, {bundle[:12]} is recorded")
    for change in cluster.plan(objects, force=True):
        drift += [f"{change.name} is gone"] if change.new else [f"{change.name}: {field}" for field in change.fields]
    return drift
