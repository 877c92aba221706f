"""Acting on a cluster: apply objects, wait for the roll-out, and reach a service through the API server.

What applying an object would change on the cluster: compared with what the API server says it would become; pure.

One deployment of a model at a time: a Lease on the cluster, renewed while it is held, told who holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from k8s.cluster.api import PASSING, Answer, Connection, connect, listed, path_of, warnings_of
from k8s.cluster.errors import refusal, silent_pods
from k8s.cluster.rollout_status import Progress, crashed, judge, made_of, pod_troubles
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, label
from pipeline.contract.errors import PipelineError, ResourceError, StageError

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


_LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_SECONDS = 30  # without a renewal its holder is gone
_RENEW_SECONDS = 8.0
_CONFLICT = 409


@dataclass(frozen=True)
class Lease:
    connection: Connection
    namespace: str
    name: str
    holder: str
    poll_seconds: float = 0.5
    lasts_seconds: int = _SECONDS

    @contextlib.contextmanager
    def held(self, wait_seconds: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """Yields what raises when it is lost, to be called before anything is changed."""
        self._take(wait_seconds, say)
        stop, lost = threading.Event(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(stop, lost), name=f"lease {self.name}", daemon=True)
        renewing.start()

        def check() -> None:
            if lost.is_set():
                raise ResourceError(f"lease/{self.name}: somebody else took it; nothing more is changed")

        try:
            yield check
        finally:
            stop.set()
            renewing.join()
            if not lost.is_set():
                self._give_back(say)

    def _take(self, wait_seconds: float, say: Callable[[str], None]) -> None:
        """An old renewal may be of another clock: what counts is how long it stays the same before our eyes."""
        deadline, said = time.monotonic() + wait_seconds, ""
        seen, since = "", time.monotonic()
        while True:
            live = self._read()
            owner = live["spec"].get("holderIdentity") if live else ""
            version = live["metadata"]["resourceVersion"] if live else ""
            if version != seen:
                seen, since = version, time.monotonic()
            lasts = live["spec"].get("leaseDurationSeconds", self.lasts_seconds) if live else 0
            if (not owner or time.monotonic() - since > lasts) and self._write(live, self.holder):
                return
            if owner and time.monotonic() >= deadline:
                raise ResourceError(
                    f"{owner} is deploying {self.name.removesuffix('-deploy')} in namespace {self.namespace}; waited "
                    f"{wait_seconds:g} s for it (rollout.wait_seconds)"
                )
            if owner and owner != said:
                say(f"{owner} is deploying here; waiting for it, {wait_seconds:g} s at most")
                said = owner
            time.sleep(self.poll_seconds)

    def _renew(self, stop: threading.Event, lost: threading.Event) -> None:
        """What cannot be renewed in time is not ours any more."""
        renewed = time.monotonic()
        while not stop.wait(min(_RENEW_SECONDS, self.lasts_seconds / 3)):
            with contextlib.suppress(PipelineError):  # the next try may succeed, and the time runs
                live = self._read()
                if live is None or live["spec"].get("holderIdentity") != self.holder:
                    break
                if self._write(live, self.holder):
                    renewed = time.monotonic()
            if time.monotonic() - renewed > self.lasts_seconds:
                break
        if not stop.is_set():
            lost.set()

    def _give_back(self, say: Callable[[str], None]) -> None:
        """What went wrong before is what is to be told; a lease that stays runs out by itself."""
        try:
            live = self._read()
            if live is not None and live["spec"].get("holderIdentity") == self.holder:
                self._write(live, "")
        except PipelineError as error:
            say(f"warning: lease/{self.name} runs out by itself, in {self.lasts_seconds} s: {error}")

    def _read(self) -> Object | None:
        answer = self.connection.request("GET", path_of(_LEASE, self.namespace, self.name))
        if answer.status == 404:
            return None
        if not answer.ok:
            raise refusal(answer, f"lease/{self.name}", self.namespace, _LEASE["apiVersion"])
        found: Object = answer.json()
        return found

    def _write(self, live: Object | None, holder: str) -> bool:
        """False when somebody was quicker."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Object = {"leaseDurationSeconds": self.lasts_seconds, "renewTime": now}
        if holder:  # an empty one is refused
            spec["holderIdentity"] = holder
        metadata: Object = {"name": self.name, "namespace": self.namespace}
        if live is not None:
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
        body = json.dumps({**_LEASE, "metadata": metadata, "spec": spec}).encode()
        method, name = ("POST", "") if live is None else ("PUT", self.name)
        answer = self.connection.request(method, path_of(_LEASE, self.namespace, name), body=body)
        if not answer.ok and answer.status != _CONFLICT:
            raise refusal(answer, f"lease/{self.name}", self.namespace, _LEASE["apiVersion"])
        return answer.ok


def holder() -> str:
    """Who deploys, for whoever comes second to read."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        name = f"user {os.getuid()}"
    return f"{name} on {socket.gethostname()} (pid {os.getpid()})"
