"""What a refusal of the API server means for the one who deploys, in words, with what mends it; pure.

Why nothing happens yet, where neither a workload nor its pods say it: a queue's word, or the cluster's events.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k8s.cluster.api import Answer, Connection, listed
from k8s.cluster.rollout_status import pod_trouble
from k8s.objects.kustomize import Object
from k8s.objects.manifests import label
from k8s.objects.training import QUEUE_LABEL
from pipeline.contract.errors import ConfigError, PipelineError, ResourceError, StageError

# What brings a kind that plain Kubernetes does not have.
_INSTALLED = {
    "serving.kserve.io": "install KServe (https://kserve.github.io/website), or set deploy.mode=deployment",
    "jobset.x-k8s.io": "install JobSet (kubectl apply --server-side -f its release's manifests.yaml)",
    "trainer.kubeflow.org": "install Kubeflow Trainer v2 (kubectl apply --server-side -k its manifests/overlays)",
    "kueue.x-k8s.io": "install Kueue (kubectl apply --server-side -f its release's manifests.yaml)",
    "monitoring.coreos.com": "install the Prometheus operator",
    "gateway.networking.k8s.io": "install the Gateway API's standard CRDs",
}
_FORBIDDEN = re.compile(r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"')
_CONFLICT = re.compile(r'conflicts? with "([^"]+)"')
_FIELD = re.compile(r"(?<=[\s-])\.[^\s;]+")
_IMMUTABLE = re.compile(r"immutable|may not be changed|may not change|updates to .* are forbidden")
_VALUE = re.compile(r"^Invalid value: .*: (?=[^:]+$)", re.DOTALL)
_LONGEST = 200


def refusal(answer: Answer, what: str, namespace: str, api_version: str = "") -> PipelineError:
    """The error of a request about `what` that was not answered with success."""
    reason = answer.reason
    if answer.status == 401:
        return ResourceError(f"{what}: the cluster does not know us any more (401: {reason}); log in again")
    if answer.status == 403:
        return _forbidden(what, namespace, reason)
    if answer.status == 404 and _is_unknown_kind(answer):
        group = api_version.partition("/")[0]
        mend = _INSTALLED.get(group, f"install what serves {api_version}")
        return StageError(f"{what}: the cluster knows no {api_version} ({reason}); {mend}")
    if answer.status == 404 and reason.startswith("namespaces"):
        return StageError(f"{what}: {reason}; make it with `kubectl create namespace {namespace}`")
    if answer.status == 422 and (fixed := _fixed_fields(answer)):
        return _immutable(what, namespace, fixed)
    if answer.status == 422 and (wrong := _wrong_fields(answer)):
        return StageError(f"{what}: the cluster finds it invalid: {'; '.join(wrong)}")
    if answer.status == 409 and (owned := taken_fields(reason)):
        others = "; ".join(f"{field} was set by {owner}" for owner, field in owned)
        return ConfigError(f"{what}: {others}; rollout.take_over=true sets it anew, or set it in pipe.yaml")
    return StageError(f"{what}: the cluster refused it ({answer.status}): {reason}")


def missing_rule(reason: str) -> str:
    """The rule of a Role that would allow what was forbidden, as YAML; empty where the reason does not say."""
    found = _FORBIDDEN.search(reason)
    if found is None:
        return ""
    group = json.dumps(found["group"])
    return f"- apiGroups: [{group}]\n  resources: [{json.dumps(found['resource'])}]\n  verbs: [{found['verb']}]"


def taken_fields(reason: str) -> list[tuple[str, str]]:
    """Who set which field, of a refused server-side apply."""
    _, *told = _CONFLICT.split(reason)  # each owner, and what is said of it
    return [(owner, field) for owner, text in zip(told[::2], told[1::2], strict=True) for field in _FIELD.findall(text)]


def _immutable(what: str, namespace: str, fields: list[str]) -> PipelineError:
    kind, _, name = what.partition("/")
    return ConfigError(
        f"{what}: {', '.join(fields)} cannot be changed in an object that is there already, and is another one now; "
        f"take the old one away with `kubectl -n {namespace} delete {kind} {name}`, or choose another name in pipe.yaml"
    )


def _causes(answer: Answer) -> list[tuple[str, str]]:
    """Field and complaint of each; the cluster says what the whole value was, which nobody reads."""
    try:
        found = answer.json()["details"]["causes"]
        pairs = [(str(cause["field"]), str(cause["message"])) for cause in found]
    except (ValueError, KeyError, TypeError):  # another layer's words
        return []
    return list(dict.fromkeys((field, _VALUE.sub("", message)[:_LONGEST]) for field, message in pairs))


def _fixed_fields(answer: Answer) -> list[str]:
    return [field for field, message in _causes(answer) if _IMMUTABLE.search(message)]


def _wrong_fields(answer: Answer) -> list[str]:
    return [f"{field}: {message}" for field, message in _causes(answer)]


def _forbidden(what: str, namespace: str, reason: str) -> PipelineError:
    if "exceeded quota" in reason:
        quota = reason.partition("exceeded quota: ")[2]
        return StageError(
            f"{what}: the quota of namespace {namespace} is used up ({quota}); ask for less "
            "(deploy.replicas, deploy.cpu, deploy.memory, cluster.cpu, cluster.memory) or have it raised"
        )
    if "system:anonymous" in reason:
        return ResourceError(
            f"{what}: the cluster does not know who we are ({reason}): the kubeconfig's user has no credentials, or "
            "what gets them failed; log in again"
        )
    if rule := missing_rule(reason):
        return ResourceError(
            f"{what}: the cluster does not allow it ({reason}). The missing rule of a Role in namespace "
            f"{namespace}; k8s/access has all that pipe needs:\n{rule}"
        )
    return StageError(f"{what}: the cluster does not allow it (403): {reason}")


def _is_unknown_kind(answer: Answer) -> bool:
    """The path is served by nobody; an object that is missing is told with a Status that names it."""
    try:
        body: Any = answer.json()
    except ValueError:
        return True
    return "could not find the requested resource" in str(body.get("message"))


_WORKLOADS = [{"apiVersion": f"kueue.x-k8s.io/{version}", "kind": "Workload"} for version in ("v1beta2", "v1beta1")]
_EVENT = {"apiVersion": "v1", "kind": "Event"}
_EVERY_SECONDS = 5.0
_MOST_PODS = 2  # that are asked about: the others wait for the same
_LONGEST_REASON = 300


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
    return f"{event.get('reason', 'Warning')}: {text}"[:_LONGEST_REASON]


def _waiting(workloads: Sequence[Object]) -> list[str]:
    """In Kueue's own words; `Admitted` speaks of checks after there is room."""
    for item in workloads:
        conditions = {one["type"]: one for one in item.get("status", {}).get("conditions", [])}
        for kind in ("QuotaReserved", "Admitted"):
            told = conditions.get(kind, {})
            if told.get("status") == "False" and told.get("message"):
                return [f"Kueue: {told['message']}"]
    return [f"Kueue has not looked at {label(item)} yet" for item in workloads]
