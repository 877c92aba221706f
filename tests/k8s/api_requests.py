"""Attributes of a request to a Kubernetes API server, as its authorizer sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = {
    "configmaps": "ConfigMap",
    "deployments": "Deployment",
    "events": "Event",
    "horizontalpodautoscalers": "HorizontalPodAutoscaler",
    "inferenceservices": "InferenceService",
    "jobs": "Job",
    "jobsets": "JobSet",
    "leases": "Lease",
    "networkpolicies": "NetworkPolicy",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "pods": "Pod",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "replicasets": "ReplicaSet",
    "scaledobjects": "ScaledObject",
    "secrets": "Secret",
    "services": "Service",
    "serviceaccounts": "ServiceAccount",
    "trainingruntimes": "TrainingRuntime",
    "trainjobs": "TrainJob",
    "workloads": "Workload",
}
_PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+).*)?)?$"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class ApiRequest:
    method: str
    target: str  # path and query
    path: str
    query: dict[str, str]
    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def resource(self) -> str:
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural

    @property
    def verb(self) -> str:
        if self.method == "GET" and not self.name:
            return "watch" if self.query.get("watch") in ("1", "true") else "list"
        return _VERBS[self.method]

    @property
    def labels(self) -> dict[str, str]:
        return self._pairs("labelSelector")

    @property
    def fields(self) -> dict[str, str]:
        return self._pairs("fieldSelector")

    def _pairs(self, word: str) -> dict[str, str]:
        pairs = (pair.partition("=") for pair in self.query.get(word, "").split(",") if pair)
        return {name: value for name, _, value in pairs}

    def forbidden(self, verb: str) -> str:
        place = f"{self.plural}.{self.group}" if self.group else self.plural
        return (
            f'{place} "{self.name}" is forbidden: User "me" cannot {verb} resource "{self.resource}" '
            f'in API group "{self.group}" in the namespace "{self.namespace}"'
        )


def parse_request(method: str, target: str, path: str, query: dict[str, str]) -> ApiRequest:
    found = _PATH.match(path)
    if found is None:
        return ApiRequest(method, target, path, query)
    parts = {name: value or "" for name, value in found.groupdict().items()}
    sub = parts.pop("sub")
    own = path if sub != "log" else path.removesuffix("/log")  # a pod's log is stored with the pod
    return ApiRequest(method, target, own, query, subresource=sub, **parts)
