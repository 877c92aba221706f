"""A cluster to deploy to: plan and apply objects, wait for roll-outs, and send requests to services and pods."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k8s.cluster.api import (
    TRANSIENT_STATUSES,
    Connection,
    NotKubernetes,
    Response,
    Unreachable,
    api_path,
    connect,
    list_objects,
    plural,
    response_warnings,
)
from k8s.cluster.errors import api_error, only_undone
from k8s.cluster.pending_reasons import pending_pod_warnings
from k8s.cluster.rollout_status import (
    Progress,
    crashed_containers,
    created_workload,
    minimum_replicas,
    pod_problems,
    rollout_progress,
)
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    BUNDLE_ANNOTATION,
    OPTIONS_ANNOTATION,
    TRACK_LABEL,
    WORKLOAD_KINDS,
    format_selector,
    kubectl_name,
)
from pipeline.system.errors import PipelineError, ResourceError, StageError
from pipeline.system.wording import number

APPLY_QUERY = {"fieldManager": "pipe", "fieldValidation": "Strict"}
DRY_RUN = {**APPLY_QUERY, "dryRun": "All"}
APPLY_CONTENT_TYPE = "application/apply-patch+yaml"  # JSON is YAML

POD = {"apiVersion": "v1", "kind": "Pod"}
_NO_HEADERS: Mapping[str, str] = {}
_VERSION_TIMEOUT_SECONDS = 10.0
_CRASH_LOG_LINES = 10
_MAX_REPEATED_LINES = 2
_MAX_VALUE_CHARACTERS = 80
_SERVER_FIELDS = (
    "managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink",
)  # fmt: skip

Report = Callable[[str], None]
ServiceResponse = tuple[int, dict[str, str], bytes]  # status, headers, body


@dataclass(frozen=True)
class Cluster:
    connection: Connection
    version: str
    namespace: str
    poll_seconds: float = 1.0

    @classmethod
    def connect(cls, context: str, namespace: str) -> Cluster:
        """Connect to a server and check that it answers; an empty `context` means the current one."""
        connection = connect(context)
        response = connection.request("GET", "/version", read_seconds=_VERSION_TIMEOUT_SECONDS)
        if not response.ok:
            raise ResourceError(
                f"the Kubernetes API server {connection.server} (context {connection.context}) "
                f"refuses our credentials ({response.status}): {response.reason}"
            )
        try:
            return cls(connection, str(response.json().get("gitVersion", "unknown")), namespace)
        except NotKubernetes as error:
            raise ResourceError(f"{connection.server} (context {connection.context}): {error}") from error

    @property
    def context(self) -> str:
        return self.connection.context

    def describe(self) -> str:
        place = f"context {self.context}, server {self.connection.server}"
        return f"{place}, Kubernetes {self.version}, namespace {self.namespace}"

    def plan(self, objects: Sequence[Object], *, force: bool = False) -> list[Change]:
        """Return what applying would change, by a dry run on the server; nothing is changed.

        Without `force`, the server refuses to overwrite fields that others have set.
        """
        changes = [self._plan_object(item, force) for item in objects]
        return [
            replace(change, fields=self._changed_options(item, objects))
            if change.new and item["kind"] == "ConfigMap"
            else change
            for change, item in zip(changes, objects, strict=True)
        ]

    def apply(self, objects: Sequence[Object], report: Report, begin: Callable[[], None] = lambda: None) -> list[str]:
        """Apply on the server side; all objects are planned first, so that a refusal leaves nothing half applied.

        `begin` is called in between.
        """
        for line in describe_changes(self.plan(objects)) or ["plan: nothing changes"]:
            report(line)
        begin()
        for item in objects:
            apply_object(self.connection, item, self.namespace, report)
        return [kubectl_name(item) for item in objects]

    def read(self, item: Object) -> Object | None:
        """Return the object as it is on the cluster; None if it does not exist."""
        return read_object(self.connection, item, self.namespace)

    def delete(self, item: Object) -> None:
        """Delete the object if it exists, but not one that was created under its name meanwhile."""
        if item["kind"] == "Secret":  # we may write Secrets, not read them
            delete_object(self.connection, item, self.namespace)
        elif live := self.read(item):
            delete_object(self.connection, item, self.namespace, live["metadata"]["uid"])

    def pods(self, item: Object) -> list[Object]:
        """Return the pods of this version of a workload; pods of older versions may still terminate."""
        return self.select(_version_selector(item))

    def select(self, selector: str, kind: Mapping[str, str] = POD) -> list[Object]:
        """Return objects by a label selector."""
        return select_objects(self.connection, kind, self.namespace, selector)

    def pod_problems(self, item: Object) -> list[str]:
        """Return why pods of this version do not start; an error that hides the pods is such a reason too."""
        try:
            pods = self.pods(item)
            return pod_problems(pods) + pending_pod_warnings(self.connection, self.namespace, pods)
        except PipelineError as error:
            return [str(error)]

    def wait(self, objects: Sequence[Object], timeout_seconds: float, report: Report) -> None:
        """Wait until every workload is rolled out; report progress, and on failure what it is stuck on."""
        deadline = time.monotonic() + timeout_seconds
        for item in objects:
            if item["kind"] in WORKLOAD_KINDS:
                replicas = minimum_replicas(item, objects)
                self._wait_for(item, replicas, deadline, timeout_seconds, report)

    def _wait_for(self, item: Object, replicas: int, deadline: float, timeout_seconds: float, report: Report) -> None:
        reported = ""
        while True:
            progress, problems = self._progress_and_problems(item, replicas)
            text = "; ".join([progress.text, *problems])
            if text != reported:
                report(f"{kubectl_name(item)}: {text}")
                reported = text
            if progress.done:
                return
            if progress.failed or time.monotonic() >= deadline:
                self._report_crash_logs(item, report)
                raise StageError(
                    f"{kubectl_name(item)} did not get ready within {number(timeout_seconds)} s: {text}; to find the "
                    f"cause: `kubectl --context {self.context} -n {self.namespace} describe pods "
                    f"-l {_version_selector(item)}`"
                )
            time.sleep(min(self.poll_seconds, max(0.0, deadline - time.monotonic())))

    def _progress_and_problems(self, item: Object, replicas: int) -> tuple[Progress, list[str]]:
        try:
            progress = self._progress(item, replicas)
            return progress, [] if progress.done else self.pod_problems(item)
        except ResourceError as error:  # the roll-out goes on while the API server restarts
            return Progress(False, str(error)), []

    def _progress(self, item: Object, replicas: int) -> Progress:
        response = self.connection.request("GET", _object_path(item, self.namespace))
        if response.status in TRANSIENT_STATUSES:
            return Progress(False, f"the API server answers {response.status}")
        if not response.ok:
            raise StageError(f"{kubectl_name(item)}: cannot be read ({response.status}): {response.reason}")
        progress = rollout_progress(response.json(), replicas)
        if progress.done and item["kind"] == "InferenceService":
            return self._created_progress(item, replicas) or progress
        return progress

    def _created_progress(self, item: Object, replicas: int) -> Progress | None:
        """Return the state of KServe's Deployment: the InferenceService is ready while old pods answer."""
        response = self.connection.request("GET", _object_path(created_workload(item), self.namespace))
        if not response.ok:
            return None
        workload = response.json()
        bundle = workload["spec"]["template"]["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION)
        if bundle != item["metadata"]["annotations"][BUNDLE_ANNOTATION]:
            return Progress(False, "KServe has not adopted the new version yet")
        return rollout_progress(workload, replicas)

    def _report_crash_logs(self, item: Object, report: Report) -> None:
        """Report the last lines of each container that crashed: its exit reason rarely explains it."""
        try:
            crashed = crashed_containers(self.pods(item))
        except PipelineError:
            return  # already reported as what the roll-out is stuck on
        for pod, container, previous in crashed:
            query = {"container": container, "tailLines": str(_CRASH_LOG_LINES), "previous": str(previous).lower()}
            response = self.connection.request("GET", f"{api_path(POD, self.namespace, pod)}/log", query)
            text = response.body.decode(errors="replace")
            lines = text.splitlines() if response.ok else [f"(its log cannot be read: {response.reason})"]
            report(f"the last lines of {pod}:")
            for line in lines:
                report(f"    {line}")

    def send(
        self, target: str, path: str, body: Any = None, headers: Mapping[str, str] = _NO_HEADERS
    ) -> ServiceResponse:
        """Send a GET, or with a body a POST, through the API server's proxy to `pods/NAME:PORT` or a service."""
        proxy = f"/api/v1/namespaces/{self.namespace}/{target}/proxy{path}"
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        response = self.connection.request("GET" if data is None else "POST", proxy, body=data, headers=headers)
        return response.status, dict(response.headers), response.body

    def _plan_object(self, item: Object, force: bool) -> Change:
        query = {**DRY_RUN, **({"force": "true"} if force else {})}
        if item["kind"] == "Secret":  # we may write Secrets, not read them
            patch_object(self.connection, item, self.namespace, query)
            return Change(kubectl_name(item), False, ())
        live = self.read(item)
        planned = patch_object(self.connection, item, self.namespace, query).json()
        return Change(kubectl_name(item), live is None, tuple(field_changes(live, planned)))

    def _changed_options(self, item: Object, objects: Sequence[Object]) -> tuple[str, ...]:
        """Compare a ConfigMap with the one that the workload uses now, which has another name."""
        workload = next((other for other in objects if other["kind"] in WORKLOAD_KINDS), None)
        if workload is None or (live := self.read(workload)) is None:
            return ()
        pod = live["spec"].get("predictor") or live["spec"]["template"]["metadata"]
        name = pod.get("annotations", {}).get(OPTIONS_ANNOTATION)
        used = self.read({**item, "metadata": {"name": name}}) if name else None
        changes = field_changes({**item, "data": used.get("data", {})}, item) if used else []
        return tuple(changes)


def read_object(connection: Connection, item: Object, namespace: str) -> Object | None:
    response = connection.request("GET", _object_path(item, namespace))
    if response.status == 404:
        return None
    if not response.ok:
        raise api_error(response, kubectl_name(item), namespace, item["apiVersion"])
    live: Object = response.json()
    return live


def delete_object(
    connection: Connection, item: Object, namespace: str, uid: str = "", accepted: tuple[int, ...] = (404,)
) -> None:
    """Delete the object with this uid; any of this name without it."""
    options = {"propagationPolicy": "Background", **({"preconditions": {"uid": uid}} if uid else {})}
    response = connection.request("DELETE", _object_path(item, namespace), body=json.dumps(options).encode())
    if not response.ok and response.status not in accepted:
        raise api_error(response, kubectl_name(item), namespace, item["apiVersion"])


def select_objects(connection: Connection, kind: Mapping[str, str], namespace: str, selector: str) -> list[Object]:
    listing = list_objects(connection, kind, namespace, {"labelSelector": selector})
    if not isinstance(listing, Response):
        return listing.items
    subject = f"listing {plural(kind['kind'])}"
    if listing.status in TRANSIENT_STATUSES:
        raise Unreachable(f"{subject}: the API server answers {listing.status}: {listing.reason}")
    raise api_error(listing, subject, namespace, kind["apiVersion"])


def apply_object(connection: Connection, item: Object, namespace: str, report: Report) -> None:
    for warning in response_warnings(patch_object(connection, item, namespace, APPLY_QUERY)):
        report(f"warning: {kubectl_name(item)}: {warning}")


def patch_object(connection: Connection, item: Object, namespace: str, query: Mapping[str, str]) -> Response:
    """Apply on the server side; DRY_RUN changes nothing. What `kubectl rollout undo` has set is overwritten."""
    path, body = _object_path(item, namespace), json.dumps(item).encode()
    response = connection.request("PATCH", path, query, body, APPLY_CONTENT_TYPE)
    if response.status == 409 and only_undone(response.reason) and (live := read_object(connection, item, namespace)):
        managers = [(fields["manager"], fields["operation"]) for fields in live["metadata"].get("managedFields", [])]
        if ("kubectl", "Update") in managers:
            response = connection.request("PATCH", path, {**query, "force": "true"}, body, APPLY_CONTENT_TYPE)
    if not response.ok:
        raise api_error(response, kubectl_name(item), namespace, item["apiVersion"])
    return response


@dataclass(frozen=True)
class Change:
    """What applying one object would change."""

    name: str  # as kubectl names it: deployment/digits
    new: bool
    fields: tuple[str, ...]  # of a new ConfigMap: how it differs from the one before it


def describe_changes(changes: Sequence[Change]) -> list[str]:
    """Return one line for each change; a change that many objects share, such as their version, only once."""
    names_by_field: dict[str, list[str]] = {}
    for change in changes:
        for field in ["new", *change.fields] if change.new else change.fields:
            names_by_field.setdefault(field, []).append(change.name)
    lines = []
    for field, names in names_by_field.items():
        if field != "new" and len(names) > _MAX_REPEATED_LINES:
            lines.append(f"plan: {names[0]} and {len(names) - 1} others: {field}")
        else:
            lines += [f"plan: {name}: {field}" for name in names]
    return lines


def field_changes(live: Object | None, planned: Object) -> list[str]:
    """Return one line for each field that differs; the values of a Secret are not shown."""
    if live is None:
        return []
    before = dict(_field_values(_without_server_fields(live)))
    after = dict(_field_values(_without_server_fields(planned)))
    is_secret = planned["kind"] == "Secret"
    return [
        f"{path}: {'changed' if is_secret else _describe_difference(before, after, path)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def _describe_difference(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> str:
    if path not in before:
        return f"+ {_shorten(after[path])}"
    if path not in after:
        return f"- {_shorten(before[path])}"
    return f"{_shorten(before[path])} → {_shorten(after[path])}"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"


def _without_server_fields(item: Object) -> Object:
    metadata = {name: value for name, value in item["metadata"].items() if name not in _SERVER_FIELDS}
    return {**{name: value for name, value in item.items() if name != "status"}, "metadata": metadata}


def _field_values(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field's path and value; list entries go by their name if they have one."""
    if isinstance(item, dict) and item:
        for name, value in item.items():
            yield from _field_values(value, f"{path}.{name}" if path else name)
    elif isinstance(item, list) and item:
        for i, value in enumerate(item):
            name = value.get("name", i) if isinstance(value, dict) else i
            yield from _field_values(value, f"{path}[{name}]")
    else:
        yield path, item


def _version_selector(item: Object) -> str:
    """Select by all common labels, which include the version, and by the one of a canary."""
    labels = item["metadata"]["labels"]
    names = (name for name in sorted(labels) if name.startswith("app.kubernetes.io/") or name == TRACK_LABEL)
    return format_selector({name: labels[name] for name in names})


def _object_path(item: Object, namespace: str) -> str:
    return api_path(item, namespace, item["metadata"]["name"])
