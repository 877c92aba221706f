"""What serves on a cluster, compared with what was put there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from k8s.cluster.canary import canary_name, share_of
from k8s.cluster.cluster import Cluster
from k8s.cluster.rollout_status import judge
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, label
from pipeline.contract.errors import PipelineError

_WORKLOADS = ("Deployment", "InferenceService")


@dataclass(frozen=True)
class State:
    """Of one deployment, as people and programs read it."""

    state: str
    troubles: tuple[str, ...] = ()
    drift: tuple[str, ...] = field(default=())


def look(context: str, namespace: str, manifests: Path, bundle: str, canary: bool = False) -> State:
    """`manifests` are those that were applied; a cluster that does not answer is a state too."""
    objects = read_manifests(manifests)
    workload = next((item for item in objects if item["kind"] in _WORKLOADS), None)
    if workload is None:
        return State(f"its manifests are gone from {manifests}")
    try:
        cluster = Cluster.connect(context)
        live = cluster.read(workload, namespace)
        if live is None:
            return State("gone", drift=(f"{label(workload)} is not on the cluster any more",))
        progress = judge(live)
        troubles = () if progress.done else tuple(cluster.troubles(workload, namespace))
        found = _drift(cluster, objects, live, namespace, bundle)
        if not canary and (left := _canary(cluster, workload, namespace)):
            found.append(f"{label(left)} is there, and no canary is recorded")
        return State(progress.text, troubles, tuple(found))
    except PipelineError as error:
        return State(f"cannot be told: {error}")


@dataclass(frozen=True)
class Found:
    """What is on the cluster now, whoever put it there."""

    bundle: str  # its digest; empty where there is nothing
    canary: bool  # beside it


def found(context: str, namespace: str, manifests: Path) -> Found:
    workload = next((item for item in read_manifests(manifests) if item["kind"] in _WORKLOADS), None)
    if workload is None:
        return Found("", False)
    cluster = Cluster.connect(context)
    live = cluster.read(workload, namespace)
    bundle = live["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "") if live else ""
    return Found(bundle, _canary(cluster, workload, namespace) is not None)


def read_manifests(folder: Path) -> list[Object]:
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    found = [item for file in files for item in yaml.safe_load_all(file.read_text())]
    return [item for item in found if item and item["kind"] != "Kustomization"]


def _canary(cluster: Cluster, workload: Object, namespace: str) -> Object | None:
    """One beside the stable version, as a `pipe` that was killed leaves it."""
    if workload["kind"] != "Deployment":
        return None
    name = canary_name(workload["metadata"]["name"])
    return cluster.read({**workload, "metadata": {"name": name}}, namespace)


def _drift(cluster: Cluster, objects: Sequence[Object], live: Object, namespace: str, bundle: str) -> list[str]:
    """Fields that are not as they were put; what was put is applied again in a dry run, as its owner would."""
    serving = live["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "none")
    found = [] if serving == bundle else [f"bundle {serving[:12]} {_how(live)}, {bundle[:12]} is recorded"]
    for change in cluster.plan(objects, namespace, take_over=True):
        found += [f"{change.label} is gone"] if change.new else [f"{change.label}: {field}" for field in change.fields]
    return found


def _how(live: Object) -> str:
    share = share_of(live) if live["kind"] == "InferenceService" else None
    return "serves" if share is None else f"is there for {share} % of the requests"
