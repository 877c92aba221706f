"""A collection of the API server, whole: page after page, each object with the kind that a list leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k8s.api import Answer, Connection, path_of
from k8s.manifest import Object

PASSING = (408, 410, 429, 500, 502, 503, 504)  # busy, restarting, or a list that grew too old between two pages


@dataclass(frozen=True)
class Listed:
    items: list[Object]
    version: str  # where a watch goes on


def listed(
    connection: Connection, kind: Mapping[str, str], namespace: str, query: Mapping[str, str]
) -> Listed | Answer:
    """All that match, or the refusal of one of the pages."""
    path, found, more = path_of(kind, namespace), list[Object](), ""
    own = {"apiVersion": kind["apiVersion"], "kind": kind["kind"]}
    while True:
        answer = connection.request("GET", path, {**query, "continue": more} if more else query)
        if not answer.ok:
            return answer
        body = answer.json()
        found += [{**item, **own} for item in body.get("items") or []]
        more = body["metadata"].get("continue", "")
        if not more:
            return Listed(found, str(body["metadata"].get("resourceVersion", "")))
