"""The project's own changes to objects: `deploy.overlay` and `cluster.overlay`, folders with a kustomize Component.

That of a service is applied to the finished objects, so that it can add to them and change what no setting names; that
of the cluster to the Job of each step, before training is put into another workload. What pipe itself relies on must
stay: the name, selector, image and bundle of the workload, and the pods of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from k8s.objects import kustomize
from k8s.objects.kustomize import Object
from k8s.objects.manifests import WORKLOAD_KINDS, identity_labels, kubectl_name
from pipeline.contract.config import Config
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_mapping, digest_tree

# Paths in objects that an overlay must leave as they are.
_CONTAINER = "spec.template.spec.containers.0"
_KEPT = {
    "Job": (
        *("spec.completionMode", "spec.completions", "spec.parallelism", "spec.template.metadata.labels"),
        *(f"{_CONTAINER}.{field}" for field in ("name", "image", "command", "args", "workingDir")),
    ),
    "Deployment": (
        "spec.selector",
        "spec.template.metadata.annotations",
        "spec.template.metadata.labels",
        *(f"{_CONTAINER}.{field}" for field in ("name", "image", "envFrom")),
    ),
    "InferenceService": ("spec.predictor.annotations", "spec.predictor.containers.0.image"),
    "ServingRuntime": ("spec.containers.0.image",),
    "NetworkPolicy": ("spec.podSelector", "spec.policyTypes"),
    "Service": ("spec.selector",),
    "ConfigMap": ("data", "immutable"),
}
_KEPT["Rollout"] = _KEPT["Deployment"]


def overlay_folder(root: Path, config: Config, section: Literal["deploy", "cluster"] = "deploy") -> Path | None:
    """Return the folder of the overlay; None without one."""
    name = config.deploy.overlay if section == "deploy" else config.cluster.overlay
    if not name:
        return None
    folder = root / name
    if not (folder / "kustomization.yaml").is_file():
        raise ConfigError(
            f"{section}.overlay: no kustomization.yaml in {folder}; see docs/kubernetes-production.md, Overlay"
        )
    return folder


def overlay_digest(folder: Path | None) -> str:
    return digest_mapping(digest_tree(folder)) if folder is not None else ""


def apply_overlay(objects: Sequence[Object], folder: Path, config: Config) -> list[Object]:
    """Apply the overlay and check the result."""
    changed = _apply("deploy.overlay", folder, objects)
    known = {_identity(item) for item in objects}
    for item in changed:
        if _identity(item) not in known:
            _adopt(item, config)
    return changed


def overlay_job(job: Object, folder: Path | None) -> Object:
    """Return the Job of a step with the overlay of the cluster."""
    if folder is None:
        return job
    changed, *added = _apply("cluster.overlay", folder, [job])
    if added:
        raise ConfigError(f"cluster.overlay: adds {kubectl_name(added[0])}; it can only change Jobs")
    return changed


def _apply(setting: str, folder: Path, objects: Sequence[Object]) -> list[Object]:
    try:
        changed = kustomize.apply(folder, objects)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ConfigError(f"{setting}: {folder}: {error}") from error
    _check_kept(setting, objects, changed)
    return changed


def _identity(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _check_kept(setting: str, objects: Sequence[Object], changed: Sequence[Object]) -> None:
    after = {_identity(item): item for item in changed}
    for item in objects:
        kept = _KEPT.get(item["kind"])
        if kept is None:
            continue
        if (other := after.get(_identity(item))) is None:
            raise ConfigError(f"{setting}: removes {kubectl_name(item)}, which must stay")
        for path in ("metadata.namespace", "metadata.annotations", *kept):
            before, now = _value_at(item, path), _value_at(other, path)
            is_open = path.endswith((".annotations", ".labels")) and isinstance(now, dict)
            if before != now and not (is_open and (before or {}).items() <= now.items()):
                raise ConfigError(f"{setting}: changes {path} of {kubectl_name(item)}, which pipe sets; leave it")
    for item in changed:
        if item["kind"] in WORKLOAD_KINDS and _identity(item) not in {_identity(made) for made in objects}:
            raise ConfigError(f"{setting}: adds {kubectl_name(item)}; a deployment has one workload")


def _value_at(item: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(item, list):
            item = item[int(name)] if int(name) < len(item) else None
        else:
            item = item.get(name) if isinstance(item, dict) else None
    return item


def _adopt(item: Object, config: Config) -> None:
    """Put an added object into the namespace, with the labels by which it is known as this service's."""
    metadata = item["metadata"]
    if metadata.setdefault("namespace", config.deploy.namespace) != config.deploy.namespace:
        raise ConfigError(
            f"deploy.overlay: {kubectl_name(item)} is in namespace {metadata['namespace']}, the service in "
            f"{config.deploy.namespace}; leave the namespace out"
        )
    metadata["labels"] = {**metadata.get("labels", {}), **identity_labels(config.name, "serving")}
