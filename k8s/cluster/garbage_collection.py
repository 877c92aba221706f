"""Garbage collection of the ConfigMaps and Secrets that no version of a service uses any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from k8s.cluster.canary import canary_name
from k8s.cluster.cluster import Cluster, Report
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    ACCESS_ANNOTATION,
    OPTIONS_ANNOTATION,
    TRACK_LABEL,
    format_selector,
    identity_labels,
    kubectl_name,
)
from pipeline.system.errors import PipelineError

_CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap"}
_REPLICA_SET = {"apiVersion": "apps/v1", "kind": "ReplicaSet"}


def delete_unused_configuration(
    cluster: Cluster, name: str, keep: str, report: Report, check_lease: Callable[[], None]
) -> None:
    """Delete what no version names, not even one that `kubectl rollout undo` restores; `keep` is the newest ConfigMap.

    The Secrets are those that the ConfigMaps name, so that no Secret has to be read. An error is only a warning: what
    is left is deleted after the next deployment.
    """
    try:
        selector = format_selector(identity_labels(name, "serving"))
        items = cluster.select(selector, _CONFIG_MAP)
        used_names = {keep, *_used_names(cluster, name, selector)}
        check_lease()  # another deployment may have applied what its pods do not name yet
        used = [item for item in items if item["metadata"]["name"] in used_names]
        used_secrets = {_secret_name(item) for item in used}
        for item in items:
            if item in used or not item.get("immutable"):  # made by hand
                continue
            if (secret_name := _secret_name(item)) and secret_name not in used_secrets:
                secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret_name}}
                _delete(secret, cluster, report)
            _delete(item, cluster, report)
    except PipelineError as error:
        report(f"warning: unused ConfigMaps and Secrets are left: {error}")


def _used_names(cluster: Cluster, name: str, selector: str) -> Iterator[str]:
    """Yield the ConfigMaps of all versions; those of a canary only as long as its Deployment exists."""
    canary = canary_name(name)
    for item in cluster.select(selector, _REPLICA_SET):
        if canary not in (owner["name"] for owner in item["metadata"].get("ownerReferences", [])):
            yield _config_map_name(item["spec"]["template"])
    for pod in cluster.select(selector):
        if TRACK_LABEL not in pod["metadata"].get("labels", {}):
            yield _config_map_name(pod)
    for deployment in (name, canary):
        item = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": deployment}}
        if (live := cluster.read(item)) is not None:
            yield _config_map_name(live["spec"]["template"])


def _config_map_name(pod: Object) -> str:
    return str(pod["metadata"].get("annotations", {}).get(OPTIONS_ANNOTATION, ""))


def _secret_name(config_map: Object) -> str:
    return str(config_map["metadata"].get("annotations", {}).get(ACCESS_ANNOTATION, ""))


def _delete(item: Object, cluster: Cluster, report: Report) -> None:
    cluster.delete(item)
    report(f"deleted {kubectl_name(item)}, which no version uses")
