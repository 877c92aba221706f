"""Reasons why a workload does not start that only Kueue or the cluster's events report, not the pods themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from k8s.cluster.api import Connection, Response, list_objects
from k8s.cluster.rollout_status import abandoned_since, pod_problem, read_conditions
from k8s.objects.kustomize import Object
from k8s.objects.manifests import kubectl_name
from k8s.objects.training import QUEUE_LABEL
from pipeline.system.errors import PipelineError

# The newer version first; clusters with an older Kueue only serve the other.
_KUEUE_WORKLOADS = [
    {"apiVersion": f"kueue.x-k8s.io/{version}", "kind": "Workload"} for version in ("v1beta2", "v1beta1")
]
_EVENT = {"apiVersion": "v1", "kind": "Event"}
_REFRESH_SECONDS = 5.0
_KUBELET_TIMEOUT = timedelta(seconds=20)  # for taking a pod
_MAX_PODS = 2  # whose events are read: the others usually wait for the same
_MAX_REASON_CHARACTERS = 300


@dataclass
class PendingReasons:
    """The reasons of one step's workload; `get` may be called often and sends requests only now and then."""

    connection: Connection
    namespace: str
    refresh_seconds: float = _REFRESH_SECONDS
    _read_at: float = field(default=float("-inf"))
    _reasons: tuple[str, ...] = ()

    def get(self, job: Object, pods: Sequence[Object]) -> tuple[str, ...]:
        now = time.monotonic()
        if now - self._read_at >= self.refresh_seconds:
            self._read_at, self._reasons = now, self._read(job, pods)
        return self._reasons

    def _read(self, job: Object, pods: Sequence[Object]) -> tuple[str, ...]:
        try:
            if job["spec"].get("suspend"):
                return tuple(_kueue_reasons(self._kueue_workloads(job)))
            if not pods:
                return tuple(newest_warning(self.connection, self.namespace, "Job", _pod_owner_name(job), job))
            return tuple(pending_pod_warnings(self.connection, self.namespace, pods))
        except PipelineError:
            return ()  # the watches report an unreachable cluster

    def _kueue_workloads(self, job: Object) -> list[Object]:
        """Return Kueue's objects for the job; none if another queue holds it, or if we may not list them."""
        if QUEUE_LABEL not in job["metadata"].get("labels", {}):
            return []
        for kind in _KUEUE_WORKLOADS:
            query = {"labelSelector": f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"}
            listing = list_objects(self.connection, kind, self.namespace, query)
            if not isinstance(listing, Response):
                return listing.items
        return []


def pending_pod_warnings(connection: Connection, namespace: str, pods: Sequence[Object]) -> list[str]:
    """Return the nodes that do not work, and the warnings of pods that are pending without a reason in their status."""
    pending = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending" and not pod_problem(pod)]
    warnings = [problem for pod in pods for problem in _node_problem(connection, pod)]
    for pod in pending[:_MAX_PODS]:
        name = pod["metadata"]["name"]
        warnings += [f"{name}: {text}" for text in newest_warning(connection, namespace, "Pod", name, pod)]
    return warnings


def _node_problem(connection: Connection, pod: Object) -> list[str]:
    """Return the pod's node if it does not report on the pod; we may not be allowed to read why."""
    since, latest = abandoned_since(pod), (datetime.now(UTC) - _KUBELET_TIMEOUT).isoformat()
    if not "" < since < latest:
        return []
    node, text = pod["spec"]["nodeName"], "has not responded"
    response = connection.request("GET", f"/api/v1/nodes/{node}")
    ready = read_conditions(response.json()["status"]).get("Ready", {}) if response.ok else {}
    if ready.get("status", "True") != "True":
        text, since = f"is not ready, {ready.get('message')},", ready["lastTransitionTime"]
    return [
        f"{pod['metadata']['name']}: node {node} {text} since {datetime.fromisoformat(since).astimezone():%H:%M:%S}"
    ]


def newest_warning(connection: Connection, namespace: str, kind: str, name: str, since: Object) -> list[str]:
    """Return the newest warning about an object that is not older than `since`; none if we may not list events.

    Without a warning, it is the image that is being pulled: from a registry that does not answer that takes minutes.
    Probes fail while a container starts, so that they are none.
    """
    query = {"fieldSelector": f"involvedObject.kind={kind},involvedObject.name={name}"}
    listing = list_objects(connection, _EVENT, namespace, query)
    if isinstance(listing, Response):
        return []
    created = since["metadata"].get("creationTimestamp", "")
    events = sorted((item for item in listing.items if _event_time(item)[:19] >= created[:19]), key=_event_time)
    warnings = [event for event in events if event.get("type") == "Warning" and event.get("reason") != "Unhealthy"]
    reasons = warnings or [event for event in events[-1:] if event.get("reason") == "Pulling"]
    texts = (f"{item.get('reason', 'Warning')}: {item.get('message', '')}" for item in reasons[-1:])
    return [" ".join(text.split())[:_MAX_REASON_CHARACTERS] for text in texts]


def _pod_owner_name(job: Object) -> str:
    """Return the Job that creates the pods: inside a JobSet or a TrainJob it has another name."""
    name = str(job["metadata"]["name"])
    return name if job["kind"] == "Job" else f"{name}-node-0"


def _event_time(event: Object) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((str(time) for time in times if time), "")


def _kueue_reasons(workloads: Sequence[Object]) -> list[str]:
    """Return Kueue's message: first about quota, then about the admission checks that follow."""
    for item in workloads:
        conditions = read_conditions(item.get("status", {}))
        for kind in ("QuotaReserved", "Admitted"):
            condition = conditions.get(kind, {})
            if condition.get("status") == "False" and condition.get("message"):
                return [f"Kueue: {condition['message']}"]
    return [f"Kueue has not processed {kubectl_name(item)} yet" for item in workloads]
