"""What applying an object would change on the cluster: compared with what the API server says it would become; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from k8s.manifest import Object

_KEPT_BY_THE_CLUSTER = (
    "managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink",
)  # fmt: skip
_LONGEST = 80


def changes(live: Object | None, wanted: Object) -> list[str]:
    """One line for each field that differs; nothing where nothing would change."""
    if live is None:
        return []
    before, after = dict(_leaves(_bare(live))), dict(_leaves(_bare(wanted)))
    hidden = wanted["kind"] == "Secret"
    return [
        f"{place}: {'changed' if hidden else _told(before, after, place)}"
        for place in sorted(before.keys() | after.keys())
        if before.get(place) != after.get(place)
    ]


def _told(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> str:
    if place not in before:
        return f"+ {_short(after[place])}"
    if place not in after:
        return f"- {_short(before[place])}"
    return f"{_short(before[place])} → {_short(after[place])}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _bare(item: Object) -> Object:
    metadata = {name: value for name, value in item["metadata"].items() if name not in _KEPT_BY_THE_CLUSTER}
    return {**{name: value for name, value in item.items() if name != "status"}, "metadata": metadata}


def _leaves(item: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by their path; entries of a list by their name where they have one."""
    if isinstance(item, dict) and item:
        for name, value in item.items():
            yield from _leaves(value, f"{place}.{name}" if place else name)
    elif isinstance(item, list) and item:
        for i, value in enumerate(item):
            name = value.get("name", i) if isinstance(value, dict) else i
            yield from _leaves(value, f"{place}[{name}]")
    else:
        yield place, item
