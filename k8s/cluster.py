"""Acting on a cluster: apply objects, wait for the roll-out, and reach a service through the API server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k8s.api import Answer, Connection, connect, path_of, warnings_of
from k8s.diff import changes
from k8s.listing import PASSING, listed
from k8s.manifest import BUNDLE_ANNOTATION, Object, label
from k8s.reasons import silent_pods
from k8s.refusal import refusal
from k8s.rollout import Progress, crashed, judge, made_of, pod_troubles
from pipeline.spec.errors import PipelineError, ResourceError, StageError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """What a plan says of one object."""

    label: str
    new: bool
    fields: tuple[str, ...]


def told(changes: Sequence[Change]) -> list[str]:
    """One line for each change; what is the same in many objects, as their version, is told once."""
    where: dict[str, list[str]] = {}
    for change in changes:
        for field in ["new"] if change.new else change.fields:
            where.setdefault(field, []).append(change.label)
    found = []
    for field, labels in where.items():
        if field != "new" and len(labels) > _MANY:
            found.append(f"plan: {labels[0]} and {len(labels) - 1} others: {field}")
        else:
            found += [f"plan: {label}: {field}" for label in labels]
    return found


_NONE: Mapping[str, str] = {}
_APPLY = {"fieldManager": "pipe", "fieldValidation": "Strict"}
_MANY = 2
_SAME = "plan: nothing changes"
_LAST_LINES = 10
_POD = {"apiVersion": "v1", "kind": "Pod"}
_VERSION_SECONDS = 10.0


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

    def plan(self, objects: Sequence[Object], namespace: str, take_over: bool = False) -> list[Change]:
        """What applying would change, by the API server's own word; changes nothing."""
        return [self._change(item, namespace, take_over) for item in objects]

    def apply(self, objects: Sequence[Object], namespace: str, say: Say, take_over: bool = False) -> list[str]:
        """Server-side apply; the plan of all comes first, so that a refusal leaves nothing half applied."""
        for line in told(self.plan(objects, namespace, take_over)) or [_SAME]:
            say(line)
        for item in objects:
            for warning in warnings_of(self._patch(item, namespace, _applying(take_over))):
                say(f"warning: {label(item)}: {warning}")
        return [label(item) for item in objects]

    def read(self, item: Object, namespace: str) -> Object | None:
        """As it is on the cluster; None when it is not there."""
        answer = self.connection.request("GET", path_of(item, namespace, item["metadata"]["name"]))
        if answer.status == 404:
            return None
        if not answer.ok:
            raise refusal(answer, label(item), namespace, item["apiVersion"])
        found: Object = answer.json()
        return found

    def delete(self, item: Object, namespace: str) -> None:
        """The object that is there now, if any, and no later one of its name."""
        if (live := self.read(item, namespace)) is None:
            return
        options = {"preconditions": {"uid": live["metadata"]["uid"]}, "propagationPolicy": "Background"}
        path = path_of(item, namespace, item["metadata"]["name"])
        answer = self.connection.request("DELETE", path, body=json.dumps(options).encode())
        if not answer.ok and answer.status != 404:
            raise refusal(answer, label(item), namespace, item["apiVersion"])

    def pods(self, item: Object, namespace: str) -> list[Object]:
        """Of this version of a workload: old ones may still end, and their state says nothing about the new."""
        return self.select(_selector(item), namespace)

    def select(self, selector: str, namespace: str) -> list[Object]:
        """Pods by their labels."""
        found = listed(self.connection, _POD, namespace, {"labelSelector": selector})
        if isinstance(found, Answer):
            raise refusal(found, "listing pods", namespace)
        return found.items

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

    def ask_pod(
        self, namespace: str, pod: str, path: str, body: Any = None, headers: Mapping[str, str] = _NONE
    ) -> tuple[int, dict[str, str], bytes]:
        """One pod, whatever Service stands before it; `pod` may begin with `https:` and end with `:port`."""
        place = f"/api/v1/namespaces/{namespace}/pods/{pod}/proxy{path}"
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        answer = self.connection.request("GET" if data is None else "POST", place, body=data, more=headers)
        return answer.status, dict(answer.headers), answer.body

    def _change(self, item: Object, namespace: str, take_over: bool) -> Change:
        secret = item["kind"] == "Secret"  # is written, never read
        live = None if secret else self.read(item, namespace)
        answer = self._patch(item, namespace, {**_applying(take_over), "dryRun": "All"})
        return Change(label(item), live is None and not secret, () if secret else tuple(changes(live, answer.json())))

    def _patch(self, item: Object, namespace: str, query: dict[str, str]) -> Answer:
        path = path_of(item, namespace, item["metadata"]["name"])
        body = json.dumps(item).encode()  # JSON is YAML
        answer = self.connection.request("PATCH", path, query, body, "application/apply-patch+yaml")
        if not answer.ok:
            raise refusal(answer, label(item), namespace, item["apiVersion"])
        return answer

    def _wait_for(self, item: Object, namespace: str, deadline: float, timeout_seconds: float, say: Say) -> None:
        said = ""
        while True:
            progress, troubles = self._look(item, namespace)
            text = "; ".join([progress.text, *troubles])
            if text != said:
                say(f"{label(item)}: {text}")
                said = text
            if progress.done:
                return
            if progress.failed or time.monotonic() >= deadline:
                self._tell_last_words(item, namespace, say)
                raise StageError(
                    f"{label(item)} did not get ready within {timeout_seconds:g} s: {text}; look closer with "
                    f"`kubectl --context {self.context} -n {namespace} describe pods -l {_selector(item)}`"
                )
            time.sleep(min(self.poll_seconds, max(0.0, deadline - time.monotonic())))

    def _look(self, item: Object, namespace: str) -> tuple[Progress, list[str]]:
        """The state of a workload and, until it is rolled out, of its pods."""
        try:
            progress = self._progress(item, namespace)
            return progress, [] if progress.done else self.troubles(item, namespace)
        except ResourceError as error:  # a restarting API server must not end a roll-out that goes on without it
            return Progress(False, str(error)), []

    def _progress(self, item: Object, namespace: str) -> Progress:
        answer = self.connection.request("GET", path_of(item, namespace, item["metadata"]["name"]))
        if answer.status in PASSING:
            return Progress(False, f"the API server answers {answer.status}")
        if not answer.ok:
            raise StageError(f"{label(item)}: cannot be read ({answer.status}): {answer.reason}")
        progress = judge(answer.json())
        if progress.done and item["kind"] == "InferenceService":
            return self._progress_behind(item, namespace, answer.json()) or progress
        return progress

    def _progress_behind(self, item: Object, namespace: str, live: Object) -> Progress | None:
        """KServe calls a service ready while old pods still answer; the Deployment or Revision it made knows better."""
        made = made_of(live)
        answer = self.connection.request("GET", path_of(made, namespace, made["metadata"]["name"]))
        if not answer.ok:
            return None
        found = answer.json()
        notes = (found if made["kind"] == "Revision" else found["spec"]["template"])["metadata"].get("annotations", {})
        if notes.get(BUNDLE_ANNOTATION) != item["metadata"]["annotations"][BUNDLE_ANNOTATION]:
            return Progress(False, "KServe has not taken over the new version yet")
        return judge(found) if made["kind"] == "Deployment" else None

    def troubles(self, item: Object, namespace: str) -> list[str]:
        try:
            pods = self.pods(item, namespace)
            return pod_troubles(pods) + silent_pods(self.connection, namespace, pods)
        except PipelineError as error:
            return [str(error)]

    def _tell_last_words(self, item: Object, namespace: str, say: Say) -> None:
        """Of each container that ended badly, which its reason alone seldom explains."""
        try:
            found = crashed(self.pods(item, namespace))
        except PipelineError:
            return  # what hides the pods is told as what the roll-out is stuck on
        for pod, container, before in found:
            query = {"container": container, "tailLines": str(_LAST_LINES), "previous": str(before).lower()}
            answer = self.connection.request("GET", f"{path_of(_POD, namespace, pod)}/log", query)
            words = answer.body.decode(errors="replace") if answer.ok else f"(its log cannot be read: {answer.reason})"
            say(f"the last lines of {pod}:")
            for line in words.splitlines():
                say(f"    {line}")


def _applying(take_over: bool) -> dict[str, str]:
    """Fields that somebody else has set are left to them, and told, unless they are to be taken over."""
    return {**_APPLY, "force": "true"} if take_over else dict(_APPLY)


def _selector(item: Object) -> str:
    """The pods of this version: old ones may still end, and their state says nothing about the new."""
    labels = item["metadata"]["labels"]
    return ",".join(f"{name}={labels[name]}" for name in sorted(labels) if name.startswith("app.kubernetes.io/"))


def _proxy_path(namespace: str, service: str, port: str, path: str) -> str:
    return f"/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy{path}"
