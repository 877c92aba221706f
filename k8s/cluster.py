"""Acting on a cluster: apply objects, wait for the roll-out, and reach a service through the API server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k8s.api import Answer, Connection, connect, path_of
from k8s.manifest import BUNDLE_ANNOTATION, Object
from k8s.rollout import Progress, judge, pod_troubles
from pipeline.spec.errors import ResourceError, StageError

Say = Callable[[str], None]

_NONE: Mapping[str, str] = {}
_APPLY = {"fieldManager": "pipe", "force": "true", "fieldValidation": "Strict"}
_DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment"}
_POD = {"apiVersion": "v1", "kind": "Pod"}
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_VERSION_SECONDS = 10.0
_PASSING = (429, 500, 502, 503, 504)  # what an API server answers while it is busy or restarts


@dataclass(frozen=True)
class Cluster:
    connection: Connection
    version: str
    poll_seconds: float = 1.0

    @classmethod
    def connect(cls, context: str) -> Cluster:
        """A server that really answers; `context` empty means the current one."""
        connection = connect(context)
        answer = connection.request("GET", "/version", read_seconds=_VERSION_SECONDS)
        if not answer.ok:
            raise ResourceError(
                f"the Kubernetes API server {connection.server} (context {connection.context}) "
                f"refuses us ({answer.status}): {answer.reason}"
            )
        return cls(connection, str(answer.json().get("gitVersion", "unknown")))

    @property
    def context(self) -> str:
        return self.connection.context

    def describe(self) -> str:
        """Where things will go, for people to read before they go there."""
        return f"context {self.context}, server {self.connection.server}, Kubernetes {self.version}"

    def apply(self, objects: Sequence[Object], namespace: str, say: Say) -> list[str]:
        """Server-side apply; all are tried as a dry run first, so that a refusal leaves nothing half applied."""
        for item in objects:
            self._patch(item, namespace, {**_APPLY, "dryRun": "All"})
        for item in objects:
            for warning in _warnings(self._patch(item, namespace, _APPLY)):
                say(f"warning: {_label(item)}: {warning}")
        return [_label(item) for item in objects]

    def wait(self, objects: Sequence[Object], namespace: str, timeout_seconds: float, say: Say) -> None:
        """Until every workload is rolled out; says what changes, and at the end what it is stuck on."""
        deadline = time.monotonic() + timeout_seconds
        for item in objects:
            if item["kind"] in ("Deployment", "InferenceService"):
                self._wait_for(item, namespace, deadline, timeout_seconds, say)

    def get(self, namespace: str, service: str, port: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Ask a service through the API server's proxy; `port` is the name of the service's port."""
        answer = self.connection.request("GET", _proxy_path(namespace, service, port, path))
        return answer.status, dict(answer.headers), answer.body

    def post(
        self, namespace: str, service: str, port: str, path: str, body: Any, headers: Mapping[str, str] = _NONE
    ) -> tuple[int, dict[str, str], bytes]:
        """As `get`, sending JSON, and headers that the service asks for."""
        data = json.dumps(body, allow_nan=False).encode()
        answer = self.connection.request("POST", _proxy_path(namespace, service, port, path), body=data, more=headers)
        return answer.status, dict(answer.headers), answer.body

    def _patch(self, item: Object, namespace: str, query: dict[str, str]) -> Answer:
        path = path_of(item, namespace, item["metadata"]["name"])
        body = json.dumps(item).encode()  # JSON is YAML
        answer = self.connection.request("PATCH", path, query, body, "application/apply-patch+yaml")
        if answer.ok:
            return answer
        if answer.status == 404 and item["kind"] == "InferenceService":
            raise StageError(
                f"{_label(item)}: the cluster knows no {item['apiVersion']} ({answer.reason}); "
                "install KServe, or set deploy.mode=deployment"
            )
        raise StageError(f"{_label(item)}: the cluster refused it ({answer.status}): {answer.reason}")

    def _wait_for(self, item: Object, namespace: str, deadline: float, timeout_seconds: float, say: Say) -> None:
        said = ""
        while True:
            progress, troubles = self._look(item, namespace)
            text = "; ".join([progress.text, *troubles])
            if text != said:
                say(f"{_label(item)}: {text}")
                said = text
            if progress.done:
                return
            if progress.failed or time.monotonic() >= deadline:
                raise StageError(
                    f"{_label(item)} did not get ready within {timeout_seconds:g} s: {text}; look closer with "
                    f"`kubectl --context {self.context} -n {namespace} describe pods -l {_selector(item)}`"
                )
            time.sleep(min(self.poll_seconds, max(0.0, deadline - time.monotonic())))

    def _look(self, item: Object, namespace: str) -> tuple[Progress, list[str]]:
        """The state of a workload and, until it is rolled out, of its pods."""
        try:
            progress = self._progress(item, namespace)
            return progress, [] if progress.done else self._troubles(item, namespace)
        except ResourceError as error:  # a restarting API server must not end a roll-out that goes on without it
            return Progress(False, str(error)), []

    def _progress(self, item: Object, namespace: str) -> Progress:
        answer = self.connection.request("GET", path_of(item, namespace, item["metadata"]["name"]))
        if answer.status in _PASSING:
            return Progress(False, f"the API server answers {answer.status}")
        if not answer.ok:
            raise StageError(f"{_label(item)}: cannot be read ({answer.status}): {answer.reason}")
        progress = judge(answer.json())
        if progress.done and item["kind"] == "InferenceService":
            return self._progress_behind(item, namespace) or progress
        return progress

    def _progress_behind(self, item: Object, namespace: str) -> Progress | None:
        """KServe calls a service ready while old pods still answer; the Deployment it made, if any, knows better."""
        name = f"{item['metadata']['name']}-predictor"
        answer = self.connection.request("GET", path_of(_DEPLOYMENT, namespace, name))
        if not answer.ok:
            return None
        deployment = answer.json()
        notes = deployment["spec"]["template"]["metadata"].get("annotations", {})
        if notes.get(BUNDLE_ANNOTATION) != item["metadata"]["annotations"][BUNDLE_ANNOTATION]:
            return Progress(False, "KServe has not taken over the new version yet")
        return judge(deployment)

    def _troubles(self, item: Object, namespace: str) -> list[str]:
        path = path_of(_POD, namespace)
        answer = self.connection.request("GET", path, {"labelSelector": _selector(item)})
        return pod_troubles(answer.json()["items"]) if answer.ok else [f"its pods cannot be listed: {answer.reason}"]


def _label(item: Object) -> str:
    return f"{item['kind'].lower()}/{item['metadata']['name']}"


def _selector(item: Object) -> str:
    """The pods of this version: old ones may still end, and their state says nothing about the new."""
    labels = item["metadata"]["labels"]
    return ",".join(f"{name}={labels[name]}" for name in sorted(labels) if name.startswith("app.kubernetes.io/"))


def _proxy_path(namespace: str, service: str, port: str, path: str) -> str:
    return f"/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy{path}"


def _warnings(answer: Answer) -> list[str]:
    """The texts of the Warning headers (several come joined by commas)."""
    return [text.replace('\\"', '"') for text in _WARNING.findall(answer.headers.get("warning", ""))]
