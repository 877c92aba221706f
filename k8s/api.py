"""One connection to a Kubernetes API server: where it is, who we are, and single requests with clear errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.spec.errors import ResourceError

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0

# The plural under which the API serves each kind we make.
_PLURALS = {
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "HTTPRoute": "httproutes",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "InferenceService": "inferenceservices",
    "Ingress": "ingresses",
    "Job": "jobs",
    "JobSet": "jobsets",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ServiceMonitor": "servicemonitors",
    "ServingRuntime": "servingruntimes",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """What a Kubernetes Status says, or the plain text some layers answer with."""
        try:
            return str(self.json()["message"])
        except (ValueError, KeyError, TypeError):
            return self.body.decode(errors="replace").strip()[:300] or f"HTTP {self.status}"


@dataclass(frozen=True)
class Connection:
    context: str
    configuration: Any  # kubernetes.client.Configuration: address, certificates, credentials that refresh themselves
    pool: Any  # urllib3.PoolManager, with the configuration's certificates

    @property
    def server(self) -> str:
        return str(self.configuration.host)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        read_seconds: float = _READ_SECONDS,
        more: Mapping[str, str] | None = None,
    ) -> Answer:
        """Any status is an answer; only a server that cannot be reached is an error."""
        import urllib3

        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "pipe", **(more or {})}
        for setting in self.configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"]
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds)
        try:
            response = self.pool.request(method, url, body=body, headers=headers, timeout=timeout, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise ResourceError(
                f"the Kubernetes API server {self.server} (context {self.context}) does not answer: {error}"
            ) from error
        names = {name.lower(): response.headers[name] for name in response.headers}  # repeated ones come joined
        return Answer(response.status, names, response.data)


def connect(context: str) -> Connection:
    """By kubeconfig, or by the service account when we run inside the cluster."""
    try:
        from kubernetes import client
    except ImportError as error:
        raise ResourceError("the Kubernetes client is not installed; `pip install kubernetes`") from error
    configuration = client.Configuration()
    name = _load(configuration, context)
    return Connection(name, configuration, client.ApiClient(configuration).rest_client.pool_manager)


def path_of(item: Mapping[str, Any], namespace: str, name: str = "") -> str:
    """The REST path of an object, or without a name of its collection."""
    version, kind = item["apiVersion"], item["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{_PLURALS[kind]}" + (f"/{name}" if name else "")


def _load(configuration: Any, context: str) -> str:
    """Fill the configuration; returns the context's name."""
    import yaml
    from kubernetes import config

    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
            name = context or str(config.list_kube_config_contexts(config_file=files)[1]["name"])
            config.load_kube_config(files, name, configuration, persist_config=False)
            return name
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ResourceError(f"no kubeconfig at {files}; set KUBECONFIG or log in to a cluster")
        config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError, OSError) as error:
        text = " ".join(str(error).split())
        raise ResourceError(f"kubeconfig {files} cannot be used: {text}") from error
    return "in-cluster"
