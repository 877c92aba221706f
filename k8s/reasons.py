"""Why nothing happens yet, where neither a workload nor its pods say it: a queue's word, or the cluster's events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from k8s.api import Answer, Connection
from k8s.listing import listed
from k8s.manifest import Object, label
from k8s.rollout import pod_trouble
from k8s.training import QUEUE_LABEL
from pipeline.spec.errors import PipelineError

_WORKLOADS = [{"apiVersion": f"kueue.x-k8s.io/{version}", "kind": "Workload"} for version in ("v1beta2", "v1beta1")]
_EVENT = {"apiVersion": "v1", "kind": "Event"}
_EVERY_SECONDS = 5.0
_MOST_PODS = 2  # that are asked about: the others wait for the same
_LONGEST = 300


@dataclass
class Reasons:
    """Of one step's workload; asked often, it asks the cluster now and then."""

    connection: Connection
    namespace: str
    every_seconds: float = _EVERY_SECONDS
    _asked: float = field(default=float("-inf"))
    _found: tuple[str, ...] = ()

    def of(self, job: Object, pods: Sequence[Object]) -> tuple[str, ...]:
        now = time.monotonic()
        if now - self._asked >= self.every_seconds:
            self._asked, self._found = now, self._look(job, pods)
        return self._found

    def _look(self, job: Object, pods: Sequence[Object]) -> tuple[str, ...]:
        try:
            if job["spec"].get("suspend"):
                return tuple(_waiting(self._admission(job)))
            if not pods:
                return tuple(warnings(self.connection, self.namespace, "Job", _maker(job), job))
            return tuple(silent_pods(self.connection, self.namespace, pods))
        except PipelineError:
            return ()  # that the cluster does not answer is told by those who watch

    def _admission(self, job: Object) -> list[Object]:
        """What Kueue made of it: where another queue holds it, or we may not look, there is none."""
        if QUEUE_LABEL not in job["metadata"].get("labels", {}):
            return []
        for kind in _WORKLOADS:  # the second one for a cluster that does not know the first yet
            query = {"labelSelector": f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"}
            found = listed(self.connection, kind, self.namespace, query)
            if not isinstance(found, Answer):
                return found.items
        return []


def silent_pods(connection: Connection, namespace: str, pods: Sequence[Object]) -> list[str]:
    """Pods that wait and do not say for what, as for a Secret that is not there: the kubelet tells it as an event."""
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending" and not pod_trouble(pod)]
    found = []
    for pod in waiting[:_MOST_PODS]:
        name = pod["metadata"]["name"]
        found += [f"{name}: {text}" for text in warnings(connection, namespace, "Pod", name, pod)]
    return found


def warnings(connection: Connection, namespace: str, kind: str, name: str, since: Object) -> list[str]:
    """The newest warning about an object that is no older than `since`; nothing where we may not look."""
    query = {"fieldSelector": f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"}
    found = listed(connection, _EVENT, namespace, query)
    if isinstance(found, Answer):
        return []
    made = since["metadata"].get("creationTimestamp", "")
    told = sorted((_when(event), _text(event)) for event in found.items if _when(event)[:19] >= made[:19])
    return [told[-1][1]] if told else []


def _maker(job: Object) -> str:
    """Which Job makes the pods: of a JobSet and a TrainJob, the one inside."""
    name = str(job["metadata"]["name"])
    return name if job["kind"] == "Job" else f"{name}-node-0"


def _when(event: Object) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((str(time) for time in times if time), "")


def _text(event: Object) -> str:
    text = " ".join(str(event.get("message", "")).split())
    return f"{event.get('reason', 'Warning')}: {text}"[:_LONGEST]


def _waiting(workloads: Sequence[Object]) -> list[str]:
    """In Kueue's own words; `Admitted` speaks of checks after there is room."""
    for item in workloads:
        conditions = {one["type"]: one for one in item.get("status", {}).get("conditions", [])}
        for kind in ("QuotaReserved", "Admitted"):
            told = conditions.get(kind, {})
            if told.get("status") == "False" and told.get("message"):
                return [f"Kueue: {told['message']}"]
    return [f"Kueue has not looked at {label(item)} yet" for item in workloads]
