"""A namespace of a real cluster, in which one test deploys, and the requests that tests send beside `pipe`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.cluster.api import Response, Unreachable
from k8s.cluster.canary import ready_pods
from k8s.cluster.cluster import Cluster
from k8s.deploy import deploy
from k8s.objects.kustomize import Object
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config, parse_config

from .images import NAME, image_name

DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME}}
SELECTOR = f"app.kubernetes.io/name={NAME}"
_POLL_SECONDS = 0.5


class Reports:
    """Collects reported lines; `on` has callbacks for texts, each called once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on: dict[str, Callable[[], None]] = {}

    def __call__(self, line: str) -> None:
        print(line)
        self.lines.append(line)
        for part in [part for part in self.on if part in line]:
            self.on.pop(part)()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Place:
    cluster: Cluster
    namespace: str
    folder: Path
    image: str  # the name, without a tag, of the images that were built for the suite
    bundles: Mapping[str, Bundle]

    def config(self, deploy: Mapping[str, Any] | None = None, rollout: Mapping[str, Any] | None = None) -> Config:
        section = {
            "namespace": self.namespace, "target": "kubernetes", "cpu": "50m", "min_replicas": 2, "max_replicas": 3,
            "timeout_seconds": 300, **(deploy or {}),
        }  # fmt: skip
        body = {"name": NAME, "task": "task.py:T", "codec": "codec.py:C", "deploy": section, "rollout": rollout or {}}
        return parse_config(body, source="test")

    def deploy(self, version: str, report: Reports, config: Config | None = None) -> dict[str, Any]:
        bundle = self.bundles[version]
        return deploy(config or self.config(), bundle, self.image_of(version), self.folder / version, False, report)

    def image_of(self, version: str) -> str:
        return image_name(self.image, self.bundles[version])

    def request(self, method: str, path: str, body: Object | None = None) -> Response:
        data = None if body is None else json.dumps(body).encode()
        return self.cluster.connection.request(method, path, body=data)

    def create(self, collection: str, item: Object) -> Object:
        """Create an object; a `collection` without a leading slash is in the core API and the namespace."""
        path = collection if collection.startswith("/") else f"/api/v1/namespaces/{self.namespace}/{collection}"
        response = self.request("POST", path, item)
        assert response.ok, response.reason
        created: Object = response.json()
        return created

    def pods(self, selector: str = SELECTOR) -> list[Object]:
        """Return the pods that are not being deleted."""
        pods = self.cluster.select(selector)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def delete_pod(self, name: str, grace_seconds: int | None = None) -> None:
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        assert self.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}", options).ok

    def evict(self, name: str) -> int:
        """Request an eviction, as `kubectl drain` does; 429 means that the disruption budget refuses it for now."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        url, data = self.cluster.connection.server + path, json.dumps(body).encode()
        # Not by pipe's client, which would wait and repeat it.
        response = self.cluster.connection.pool.request("POST", url, body=data, headers=self._headers(), retries=False)
        return int(response.status)

    def wait_for_replicas(self, count: int, report: Reports, timeout_seconds: float = 180) -> None:
        """Wait until this many pods are ready; those that are being deleted do not count."""
        wait_until(lambda: len(ready_pods(self.pods())) >= count, f"{count} ready pods", timeout_seconds)
        report(f"{count} pods are ready")

    def _headers(self) -> dict[str, str]:
        settings = self.cluster.connection.configuration.auth_settings().values()
        return {"Content-Type": "application/json", **{setting["key"]: setting["value"] for setting in settings}}


def wait_until(condition: Callable[[], bool], subject: str, timeout_seconds: float = 120) -> None:
    """Wait for a condition; an API server that does not answer meanwhile gets the request again."""
    deadline = time.monotonic() + timeout_seconds
    while not _holds(condition):
        assert time.monotonic() < deadline, f"waited {timeout_seconds:g} s for {subject}"
        time.sleep(_POLL_SECONDS)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except Unreachable:
        return False
