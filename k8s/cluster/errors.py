"""Errors of the API server, explained: what was refused, why, and what to do about it."""

from __future__ import annotations

import json
import re
from typing import Any

from k8s.cluster.api import NotKubernetes, Response
from pipeline.system.errors import ConfigError, PipelineError, ResourceError, StageError

# How to install the kinds that plain Kubernetes does not have, by API group.
_INSTALL_HINTS = {
    "serving.kserve.io": "install KServe (https://kserve.github.io/website), or set deploy.target=kubernetes",
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
_SELECTOR = re.compile(r"spec\.selector\b")
_VALUE = re.compile(r"^Invalid value: .*: (?=[^:]+$)", re.DOTALL)
_MAX_CAUSE_CHARACTERS = 200


def api_error(response: Response, subject: str, namespace: str, api_version: str = "") -> PipelineError:
    """Return the error for a request about `subject` (such as `deployment/digits`) that did not succeed."""
    reason = response.reason
    if response.status == 401:
        return ResourceError(f"{subject}: the cluster does not accept our credentials (401: {reason}); log in again")
    if response.status == 403:
        return _forbidden_error(subject, namespace, reason)
    if response.status == 404 and _is_unknown_api(response):
        group = api_version.partition("/")[0]
        hint = _INSTALL_HINTS.get(group, f"install what serves {api_version}")
        return StageError(f"{subject}: the cluster has no API {api_version} ({reason}); {hint}")
    if response.status == 404 and reason.startswith("namespaces"):
        return StageError(f"{subject}: {reason}; to fix it: `kubectl create namespace {namespace}`")
    if response.status == 422 and (immutable := _immutable_fields(response)):
        return _immutable_fields_error(subject, namespace, immutable)
    if response.status == 422 and (causes := _causes(response)):
        fields = "; ".join(f"{field}: {message}" for field, message in causes)
        return StageError(f"{subject}: the cluster rejects it as invalid: {fields}")
    if response.status == 409 and (conflicts := conflicting_fields(reason)):
        paths = [field.removeprefix(".") for _, field in conflicts]
        if subject.startswith("deployment/") and (immutable := [path for path in paths if _SELECTOR.match(path)]):
            return _immutable_fields_error(subject, namespace, immutable)  # overwriting is refused, too
        owners = "; ".join(f"{field} was set by {owner}" for owner, field in conflicts)
        return ConfigError(
            f"{subject}: {owners}; set it in pipe.yaml, or overwrite it: `pipe deploy --render`, and the kubectl "
            "command that it prints, with `--force-conflicts --field-manager=pipe`"
        )
    return StageError(f"{subject}: the cluster refused it ({response.status}): {reason}")


def missing_role_rule(reason: str) -> str:
    """Return the rule of a Role that would allow what was forbidden, as YAML; empty if the reason does not name it."""
    match = _FORBIDDEN.search(reason)
    if match is None:
        return ""
    group = json.dumps(match["group"])
    return f"- apiGroups: [{group}]\n  resources: [{json.dumps(match['resource'])}]\n  verbs: [{match['verb']}]"


def conflicting_fields(reason: str) -> list[tuple[str, str]]:
    """Return owner and field of each conflict of a refused server-side apply."""
    _, *parts = _CONFLICT.split(reason)  # an owner, then the text about it, and so on
    owners = zip(parts[::2], parts[1::2], strict=True)
    return [(owner, field) for owner, text in owners for field in _FIELD.findall(text)]


def only_undone(reason: str) -> bool:
    """Return whether all conflicts are about what `kubectl rollout undo` sets: the pods and the annotations."""
    conflicts = conflicting_fields(reason)
    undone = (".spec.template.", ".metadata.annotations.")
    return bool(conflicts) and all(owner == "kubectl" and field.startswith(undone) for owner, field in conflicts)


def _immutable_fields_error(subject: str, namespace: str, fields: list[str]) -> PipelineError:
    kind, _, name = subject.partition("/")
    return ConfigError(
        f"{subject}: {', '.join(fields)} cannot be changed in the existing object, and the new value differs; delete "
        f"the old object with `kubectl -n {namespace} delete {kind} {name}`, or choose another name in pipe.yaml"
    )


def _immutable_fields(response: Response) -> list[str]:
    return [field for field, message in _causes(response) if _IMMUTABLE.search(message)]


def _causes(response: Response) -> list[tuple[str, str]]:
    """Return field and message of each cause, without the field's whole value that the server quotes."""
    try:
        causes = response.json()["details"]["causes"]
        pairs = [(str(cause["field"]), str(cause["message"])) for cause in causes]
    except (NotKubernetes, KeyError, TypeError):  # not a Status: it comes from a proxy
        return []
    return list(dict.fromkeys((field, _VALUE.sub("", message)[:_MAX_CAUSE_CHARACTERS]) for field, message in pairs))


def _forbidden_error(subject: str, namespace: str, reason: str) -> PipelineError:
    if "exceeded quota" in reason:
        quota = reason.partition("exceeded quota: ")[2]
        return StageError(
            f"{subject}: the quota of namespace {namespace} is used up ({quota}); request less "
            "(deploy.min_replicas, deploy.cpu, deploy.memory, cluster.cpu, cluster.memory) or have it raised"
        )
    if "system:anonymous" in reason:
        return ResourceError(
            f"{subject}: the cluster does not know who we are ({reason}): the kubeconfig's user has no credentials, or "
            "the command that gets them failed; log in again"
        )
    if rule := missing_role_rule(reason):
        return ResourceError(
            f"{subject}: the cluster does not allow it ({reason}). To fix it, add this rule to a Role in namespace "
            f"{namespace} (k8s/manifests/access has all rules that pipe needs):\n{rule}"
        )
    return StageError(f"{subject}: the cluster does not allow it (403): {reason}")


def _is_unknown_api(response: Response) -> bool:
    """Distinguish an unknown API from a missing object: for the latter the server returns a Status that names it."""
    try:
        body: Any = response.json()
    except NotKubernetes:
        return True
    return "could not find the requested resource" in str(body.get("message"))
