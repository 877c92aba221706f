"""The part of kustomize that our folders use, built in memory: what `kubectl kustomize` would print, as objects."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images"}
_IMAGE = re.compile(r"^(?P<name>.+?)(?::(?P<tag>[^:/@]+))?(?:@(?P<digest>.+))?$")


def build(directory: Path, layers: Iterable[Path] = ()) -> list[Object]:
    """The objects of a folder, with further components on top."""
    objects = _accumulate(directory, [])
    for layer in layers:
        objects = _accumulate(layer, objects)
    return objects


def _accumulate(directory: Path, given: list[Object]) -> list[Object]:
    """In kustomize's order: resources, components, then the folder's own patches and images."""
    file = directory / "kustomization.yaml"
    asked = _read(file)[0]
    if strange := sorted(asked.keys() - _KNOWN):
        raise ValueError(f"{file}: {strange[0]}: not among the words built here ({', '.join(sorted(_KNOWN))})")
    objects = list(given)
    for name in asked.get("resources", []):
        place = directory / name
        objects += build(place) if place.is_dir() else _read(place)
    for name in asked.get("components", []):
        objects = _accumulate(directory / name, objects)
    for patch in asked.get("patches", []):
        objects = _patched(objects, patch, file)
    return [_with_images(item, asked.get("images", [])) for item in objects]


def _read(file: Path) -> list[Object]:
    return list(yaml.load_all(file.read_text(), _LOADER))


def _patched(objects: list[Object], entry: Mapping[str, Any], file: Path) -> list[Object]:
    patch = yaml.safe_load(entry["patch"])
    target = entry.get("target") or {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    chosen = [item for item in objects if _is_target(item, target)]
    if not chosen:
        raise ValueError(f"{file}: no object for a patch of {dict(target)}")
    change = merged if isinstance(patch, dict) else operated
    return [change(item, patch) if item in chosen else item for item in objects]


def _is_target(item: Object, target: Mapping[str, str]) -> bool:
    found = {"kind": item["kind"], "name": item["metadata"]["name"]}
    return all(found[word] == value for word, value in target.items())


def merged(item: Object, patch: Mapping[str, Any]) -> Object:
    """A strategic merge of mappings. How lists merge depends on each field's schema: those take a JSON patch."""
    result = dict(item)
    for name, value in patch.items():
        if isinstance(value, list):
            raise ValueError(f"{name}: a list in a merge patch; change it with a JSON patch (op, path, value)")
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result


def operated(item: Object, operations: Iterable[Mapping[str, Any]]) -> Object:
    """RFC 6902: add, replace and remove."""
    result = copy.deepcopy(item)
    for operation in operations:
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        place: Any = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        _operate(place, last, operation)
    return result


def _operate(place: Any, last: str, operation: Mapping[str, Any]) -> None:
    kind, value = operation["op"], copy.deepcopy(operation.get("value"))
    if isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if kind == "add":
            place.insert(index, value)
            return
        place[index : index + 1] = [] if kind == "remove" else [value]
        return
    if kind != "add" and last not in place:
        raise ValueError(f"JSON patch: {kind} {operation['path']}: there is none")
    if kind == "remove":
        del place[last]
    else:
        place[last] = value


def _with_images(value: Any, images: Iterable[Mapping[str, str]]) -> Any:
    """Every container's image, wherever in an object its list stands."""
    if isinstance(value, list):
        return [_with_images(item, images) for item in value]
    if not isinstance(value, dict):
        return value
    result = {name: _with_images(inner, images) for name, inner in value.items()}
    for name in ("containers", "initContainers"):
        for container in result.get(name) or []:
            if "image" in container:
                container["image"] = _renamed(container["image"], images)
    return result


def _renamed(image: str, images: Iterable[Mapping[str, str]]) -> str:
    found = _IMAGE.match(image)
    assert found is not None, image
    for entry in images:
        if entry["name"] == found["name"]:
            name = entry.get("newName", found["name"])
            tag, digest = entry.get("newTag"), entry.get("digest")
            if not tag and not digest:
                tag, digest = found["tag"], found["digest"]
            return f"{name}{f':{tag}' if tag else ''}{f'@{digest}' if digest else ''}"
    return image
