"""What a refusal of the API server means for the one who deploys, in words, with what mends it; pure."""

from __future__ import annotations

import json
import re
from typing import Any

from k8s.api import Answer
from pipeline.spec.errors import ConfigError, PipelineError, ResourceError, StageError

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
