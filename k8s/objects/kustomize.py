"""The part of kustomize that our manifests use, built in memory: the objects that `kubectl kustomize` would print."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SUPPORTED_FIELDS = {"apiVersion", "kind", "resources", "components", "patches", "images", "labels"}
_IMAGE = re.compile(r"^(?P<name>.+?)(?::(?P<tag>[^:/@]+))?(?:@(?P<digest>.+))?$")


def build(directory: Path, components: Iterable[Path] = ()) -> list[Object]:
    """Build the objects of a folder, and apply further components to them."""
    objects = _accumulate(directory, [])
    for component in components:
        objects = apply(component, objects)
    return objects


def apply(directory: Path, objects: Iterable[Object]) -> list[Object]:
    """Apply a component to objects."""
    return _accumulate(directory, list(objects))


def _accumulate(directory: Path, objects: list[Object]) -> list[Object]:
    """Apply one kustomization in kustomize's order: resources, components, then its own patches and images."""
    file = directory / "kustomization.yaml"
    kustomization = _read(file)[0]
    if unsupported := sorted(kustomization.keys() - _SUPPORTED_FIELDS):
        supported = ", ".join(sorted(_SUPPORTED_FIELDS))
        raise ValueError(f"{file}: {unsupported[0]}: not supported here; use one of {supported}")
    objects = list(objects)
    for name in kustomization.get("resources", []):
        path = directory / name
        objects += build(path) if path.is_dir() else _read(path)
    for name in kustomization.get("components", []):
        objects = _accumulate(directory / name, objects)
    for entry in kustomization.get("patches", []):
        objects = _apply_patch(objects, entry, file)
    for entry in kustomization.get("labels", []):
        objects = [_add_labels(item, entry, file) for item in objects]
    return [_replace_images(item, kustomization.get("images", [])) for item in objects]


def _add_labels(item: Object, entry: Mapping[str, Any], file: Path) -> Object:
    if unsupported := sorted(entry.keys() - {"pairs"}):
        raise ValueError(f"{file}: labels: {unsupported[0]}: not supported here; labels are added to objects only")
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **entry["pairs"]}}}


def _read(file: Path) -> list[Object]:
    return list(yaml.load_all(file.read_text(), _LOADER))


def _apply_patch(objects: list[Object], entry: Mapping[str, Any], file: Path) -> list[Object]:
    text = entry["patch"] if "patch" in entry else (file.parent / entry["path"]).read_text()
    patch = yaml.load(text, _LOADER)  # noqa: S506 - a safe loader
    target = entry.get("target") or {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    if not any(_is_target(item, target) for item in objects) and "labelSelector" not in target:
        raise ValueError(f"{file}: no object for a patch of {dict(target)}")
    if isinstance(patch, dict) and patch.get("$patch") == "delete":
        return [item for item in objects if not _is_target(item, target)]
    apply = apply_merge_patch if isinstance(patch, dict) else apply_json_patch
    return [apply(item, patch) if _is_target(item, target) else item for item in objects]


def _is_target(item: Object, target: Mapping[str, str]) -> bool:
    """Return whether kind, name and labels are as the target has them; a selector may match no object."""
    labels = [f"{name}={value}" for name, value in item["metadata"].get("labels", {}).items()]
    selected = all(pair.strip() in labels for pair in target.get("labelSelector", "").split(",") if pair.strip())
    identity = {"kind": item["kind"], "name": item["metadata"]["name"]}
    return selected and all(identity[field] == value for field, value in target.items() if field != "labelSelector")


def apply_merge_patch(item: Object, patch: Mapping[str, Any]) -> Object:
    """Merge mappings; lists are refused, because how they merge depends on each field's schema."""
    result = dict(item)
    for name, value in patch.items():
        if isinstance(value, list):
            raise ValueError(f"{name}: a list in a merge patch; change it with a JSON patch (op, path, value)")
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = apply_merge_patch(result.get(name) or {}, value)
        else:
            result[name] = value
    return result


def apply_json_patch(item: Object, operations: Iterable[Mapping[str, Any]]) -> Object:
    """Apply the operations add, replace and remove of RFC 6902."""
    result = copy.deepcopy(item)
    for operation in operations:
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        parent: Any = result
        try:
            for part in parents:
                parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        except (KeyError, IndexError, ValueError, TypeError):
            text = f"JSON patch: {operation['op']} {operation['path']}: there is no {part}"
            raise ValueError(text) from None
        _apply_operation(parent, last, operation)
    return result


def _apply_operation(parent: Any, last: str, operation: Mapping[str, Any]) -> None:
    kind, value = operation["op"], copy.deepcopy(operation.get("value"))
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if kind == "add":
            parent.insert(index, value)
            return
        parent[index : index + 1] = [] if kind == "remove" else [value]
        return
    if kind != "add" and last not in parent:
        raise ValueError(f"JSON patch: {kind} {operation['path']}: the path does not exist")
    if kind == "remove":
        del parent[last]
    else:
        parent[last] = value


def _replace_images(value: Any, images: Iterable[Mapping[str, str]]) -> Any:
    """Replace the image of every container, wherever in an object it is."""
    if isinstance(value, list):
        return [_replace_images(item, images) for item in value]
    if not isinstance(value, dict):
        return value
    result = {name: _replace_images(inner, images) for name, inner in value.items()}
    for name in ("containers", "initContainers"):
        for container in result.get(name) or []:
            if "image" in container:
                container["image"] = _replace_image(container["image"], images)
    return result


def _replace_image(image: str, images: Iterable[Mapping[str, str]]) -> str:
    match = _IMAGE.match(image)
    assert match is not None, image
    for entry in images:
        if entry["name"] == match["name"]:
            name = entry.get("newName", match["name"])
            tag, digest = entry.get("newTag"), entry.get("digest")
            if not tag and not digest:
                tag, digest = match["tag"], match["digest"]
            return f"{name}{f':{tag}' if tag else ''}{f'@{digest}' if digest else ''}"
    return image
