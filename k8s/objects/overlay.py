"""The project's own changes to the objects of a service: `deploy.overlay`, a folder with a kustomize Component.

It is applied to the finished objects, so that it can add to them and change what no setting names. What the deployment
itself relies on must stay: the name, selector, image and bundle of the workload, and the pods of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k8s.objects import kustomize
from k8s.objects.kustomize import Object
from k8s.objects.manifests import WORKLOAD_KINDS, identity_labels, kubectl_name
from pipeline.contract.config import Config
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_mapping, digest_tree

# Paths in objects that an overlay must leave as they are.
_KEPT = {
    "Deployment": (
        "spec.selector",
        "spec.template.metadata.annotations",
        "spec.template.metadata.labels",
        "spec.template.spec.containers.0.name",
        "spec.template.spec.containers.0.image",
        "spec.template.spec.containers.0.envFrom",
    ),
    "InferenceService": ("spec.predictor.annotations", "spec.predictor.containers.0.image"),
    "ServingRuntime": ("spec.containers.0.image",),
    "NetworkPolicy": ("spec.podSelector", "spec.policyTypes"),
    "Service": ("spec.selector",),
    "ConfigMap": ("data", "immutable"),
}


def overlay_folder(root: Path, config: Config) -> Path | None:
    """Return the folder of the overlay; None without one."""
    if not config.deploy.overlay:
        return None
    folder = root / config.deploy.overlay
    if not (folder / "kustomization.yaml").is_file():
        raise ConfigError(f"deploy.overlay: no kustomization.yaml in {folder}; see docs/kubernetes.md, Overlay")
    return folder


def overlay_digest(folder: Path | None) -> str:
    return digest_mapping(digest_tree(folder)) if folder is not None else ""


def apply_overlay(objects: Sequence[Object], folder: Path, config: Config) -> list[Object]:
    """Apply the overlay and check the result."""
    try:
        changed = kustomize.apply(folder, objects)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ConfigError(f"deploy.overlay: {folder}: {error}") from error
    _check_kept(objects, changed)
    known = {_identity(item) for item in objects}
    for item in changed:
        if _identity(item) not in known:
            _adopt(item, config)
    return changed


def _identity(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _check_kept(objects: Sequence[Object], changed: Sequence[Object]) -> None:
    after = {_identity(item): item for item in changed}
    for item in objects:
        kept = _KEPT.get(item["kind"])
        if kept is None:
            continue
        if (other := after.get(_identity(item))) is None:
            raise ConfigError(f"deploy.overlay: removes {kubectl_name(item)}, which every deployment needs")
        for path in ("metadata.namespace", "metadata.annotations", *kept):
            before, now = _value_at(item, path), _value_at(other, path)
            is_open = path.endswith((".annotations", ".labels")) and isinstance(now, dict)
            if before != now and not (is_open and (before or {}).items() <= now.items()):
                raise ConfigError(f"deploy.overlay: changes {path} of {kubectl_name(item)}, which pipe sets; leave it")
    for item in changed:
        if item["kind"] in WORKLOAD_KINDS and _identity(item) not in {_identity(made) for made in objects}:
            raise ConfigError(f"deploy.overlay: adds {kubectl_name(item)}; a deployment has one workload")


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
