"""The storage of the test API server: objects, owners of their fields, and the history for watches."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

Object = dict[str, Any]
Path = tuple[str, ...]
_OWN = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}  # fields without an owner


class Conflict(Exception):
    """A field has another owner, or the object has changed since it was read."""


class Store:
    """A thread-safe store; `changed` is notified of every event."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000
        self.oldest = 0  # watches from before it have expired
        self.events: list[tuple[int, str, str, Object]] = []  # version, type, path, object
        self._fields: dict[str, dict[str, set[Path]]] = {}

    def apply(self, path: str, item: Object, manager: str, force: bool, keep: bool = True) -> Object:
        """Server-side apply: remove fields that the manager no longer sets, unless another manager set them."""
        with self.changed:
            old = self.objects.get(path)
            owners = self._fields.get(path, {})
            wanted = dict(leaves(item))
            if problem := _conflicts(wanted, old, owners, manager):
                if not force:
                    raise Conflict(problem)
                owners = {
                    name: fields if name == manager else fields - wanted.keys() for name, fields in owners.items()
                }
            new = copy.deepcopy(old) if old else {}
            others = set().union(*(fields for name, fields in owners.items() if name != manager))
            for gone in owners.get(manager, set()) - wanted.keys() - others:
                _remove(new, gone)
            new = _merge(new, item)
            if not keep:
                return self._stamped(new, old, advance=False)
            self._fields[path] = {**owners, manager: set(wanted) - _OWN}
            operations = {name: "Apply" if name == "pipe" else "Update" for name in self._fields[path]}
            new["metadata"]["managedFields"] = [{"manager": n, "operation": operations[n]} for n in operations]
            return self._put(path, new, old)

    def create(self, path: str, item: Object) -> Object:
        with self.changed:
            if path in self.objects:
                raise Conflict(f'"{path.rsplit("/", 1)[1]}" already exists')
            return self._put(path, copy.deepcopy(item), None)

    def replace(self, path: str, item: Object) -> Object:
        with self.changed:
            old = self.objects[path]
            if (given := item["metadata"].get("resourceVersion")) not in (None, old["metadata"]["resourceVersion"]):
                raise Conflict(f"the object has been modified (read at {given}); please apply your changes again")
            return self._put(path, copy.deepcopy(item), old)

    def change(self, path: str, change: Callable[[Object], None]) -> Object:
        """Change an object atomically, as a controller does."""
        with self.changed:
            item = copy.deepcopy(self.objects[path])
            change(item)
            return self._put(path, item, self.objects[path])

    def set_status(self, path: str, status: Object) -> None:
        self.change(path, lambda item: item.__setitem__("status", status))

    def delete(self, path: str, uid: str = "") -> Object:
        with self.changed:
            item = self.objects[path]
            if uid and item["metadata"]["uid"] != uid:
                raise Conflict(f"the UID in the precondition ({uid}) does not match the UID in record")
            del self.objects[path]
            self._fields.pop(path, None)
            self._add_event("DELETED", path, item)
            return item

    def below(self, collection: str, labels: dict[str, str], fields: dict[str, str]) -> list[Object]:
        with self.changed:
            return [
                item
                for path, item in sorted(self.objects.items())
                if path.rpartition("/")[0] == collection and selected(item, labels)
                if all(_field(item, place) == value for place, value in fields.items())
            ]

    def expire(self) -> None:
        """Drop the history up to now."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.events.clear()

    def _put(self, path: str, item: Object, old: Object | None) -> Object:
        if old is not None and _without_server_fields(item) == _without_server_fields(old):
            return old
        item = self._stamped(item, old, advance=True)
        self.objects[path] = item
        self._add_event("MODIFIED" if old else "ADDED", path, item)
        return item

    def _stamped(self, item: Object, old: Object | None, advance: bool) -> Object:
        metadata = item["metadata"]
        before = old["metadata"] if old else {}
        metadata["uid"] = before.get("uid") or str(uuid.uuid4())
        metadata["creationTimestamp"] = before.get("creationTimestamp", "2026-01-01T00:00:00Z")
        changed = old is None or old.get("spec") != item.get("spec")
        metadata["generation"] = before.get("generation", 0) + changed
        metadata["resourceVersion"] = str(self.version + 1) if advance else before.get("resourceVersion", "")
        return item

    def _add_event(self, kind: str, path: str, item: Object) -> None:
        self.version += 1
        self.events.append((self.version, kind, path, copy.deepcopy(item)))
        self.changed.notify_all()


def selected(item: Object, labels: dict[str, str]) -> bool:
    return bool(labels.items() <= item["metadata"].get("labels", {}).items())


def _field(item: Any, place: str) -> Any:
    for name in place.split("."):
        item = item.get(name, {})
    return item


def leaves(item: Any, place: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each field that is set; list entries go by their names if they have them."""
    if isinstance(item, dict) and item:
        for name, value in item.items():
            yield from leaves(value, (*place, name))
    elif _is_named_list(item):
        for value in item:
            yield from leaves(value, (*place, f"[name={value['name']}]"))
    else:
        yield place, item


def _is_named_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(one, dict) and "name" in one for one in item)


def _conflicts(wanted: dict[Path, Any], old: Object | None, owners: dict[str, set[Path]], manager: str) -> str:
    if old is None:
        return ""
    now = dict(leaves(old))
    found = {
        name: [f".{'.'.join(field)}" for field in sorted(fields & wanted.keys()) if now.get(field) != wanted[field]]
        for name, fields in sorted(owners.items())
        if name != manager
    }
    count = sum(map(len, found.values()))
    if count == 1:
        ((name, (field,)),) = [(name, fields) for name, fields in found.items() if fields]
        return f'Apply failed with 1 conflict: conflict with "{name}" using v1: {field}'
    parts = [f'conflicts with "{name}" using v1:\n- ' + "\n- ".join(fields) for name, fields in found.items() if fields]
    return f"Apply failed with {count} conflicts: " + "\n".join(parts) if parts else ""


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        both = {name: _merge(old[name], new[name]) if name in old else new[name] for name in new}
        return copy.deepcopy({**old, **both})
    if _is_named_list(old) and _is_named_list(new):
        known = {one["name"]: one for one in old}
        found = {one["name"]: one for one in new}
        merged = [_merge(known[name], one) if name in known else one for name, one in found.items()]
        return merged + [one for name, one in known.items() if name not in found]
    return copy.deepcopy(new)


def _remove(item: Any, place: Path) -> None:
    """Remove a field, and the parents that become empty."""
    steps = []
    for name in place[:-1]:
        steps.append((item, name))
        item = _step(item, name)
        if item is None:
            return
    if isinstance(item, dict):
        item.pop(place[-1], None)
    for parent, name in reversed(steps):
        child = _step(parent, name)
        if child in ({}, [], {"name": name[6:-1]}):
            if isinstance(parent, dict):
                del parent[name]
            else:
                parent.remove(child)


def _step(item: Any, name: str) -> Any:
    if isinstance(item, dict):
        return item.get(name)
    return next((one for one in item if f"[name={one.get('name')}]" == name), None)


def _without_server_fields(item: Object) -> Object:
    hidden = ("resourceVersion", "generation", "uid", "creationTimestamp")
    metadata = {name: value for name, value in item["metadata"].items() if name not in hidden}
    return {**item, "metadata": metadata}
