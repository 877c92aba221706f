"""A Rollout of Argo Rollouts instead of the Deployment, and the Job that compares its canary with the stable pods."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from k8s.objects import network
from k8s.objects.kustomize import Object
from k8s.objects.manifests import HTTP_PORT, identity_labels
from pipeline.contract.canary import OBSERVATION_ATTEMPTS, traffic_steps
from pipeline.contract.config import Config
from pipeline.contract.settings.access import KEY_VARIABLE, Access

_API_VERSION = "argoproj.io/v1alpha1"
_START_SECONDS = 600  # for the Job to find a node and pull its image
_POD_FIELDS = (
    "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "nodeSelector",
    "tolerations", "securityContext", "volumes",
)  # fmt: skip
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "securityContext", "volumeMounts")
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "128Mi"}}


def convert_deployment(parts: Mapping[str, Object], config: Config, access: Access) -> list[Object]:
    """Make the Deployment a Rollout; return it with what it refers to.

    Its controller gives the two headless Services their selectors, and the HTTPRoute its weights.
    """
    rollout, settings = parts["Deployment"], config.rollout
    hosts = {version: f"{config.name}-{version}" for version in ("stable", "canary")}
    canary: Object = {**rollout["spec"]["strategy"]["rollingUpdate"]}
    canary |= {f"{version}Service": host for version, host in hosts.items()}
    labels = identity_labels(config.name, "canary")
    objects = [_headless(parts["Service"], host, labels) for host in hosts.values()]
    if settings.canary_percent:
        analysis: Object = {"pause": {}}  # until a person promotes it
        if settings.auto:
            analysis = {"analysis": {"templates": [{"templateName": config.name}]}}
            objects.append(_analysis_template(rollout, hosts, labels, config, access))
        percents = traffic_steps(settings.canary_percent)[: None if settings.auto else 1]
        canary["steps"] = [step for share in percents for step in ({"setWeight": max(1, round(share))}, analysis)]
    if "HTTPRoute" in parts:
        canary["trafficRouting"] = {"plugins": {"argoproj-labs/gatewayAPI": {"httpRoute": config.name}}}
        for rule in parts["HTTPRoute"]["spec"]["rules"]:
            (backend,) = rule["backendRefs"]
            rule["backendRefs"] = [
                {"group": "", "kind": "Service", **backend, "name": hosts[version], "weight": weight}
                for version, weight in (("stable", 100), ("canary", 0))
            ]
    rollout |= {"apiVersion": _API_VERSION, "kind": "Rollout"}
    rollout["spec"] |= {"strategy": {"canary": canary}, "progressDeadlineAbort": True}
    parts["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"] |= {"apiVersion": _API_VERSION, "kind": "Rollout"}
    if config.deploy.clients:
        parts["NetworkPolicy"]["spec"]["ingress"][0]["from"].append({"podSelector": {"matchLabels": labels}})
    return [*objects, rollout]


def _headless(service: Object, name: str, labels: Mapping[str, str]) -> Object:
    item = copy.deepcopy(service)
    item["metadata"]["name"] = name
    item["metadata"]["labels"] |= labels  # Prometheus finds each pod by the Service of all pods alone
    item["spec"]["clusterIP"] = "None"
    del item["spec"]["selector"]
    return item


def _analysis_template(
    rollout: Object, hosts: Mapping[str, str], labels: Mapping[str, str], config: Config, access: Access
) -> Object:
    """Return the Job as a metric: it succeeds if the canary is to be promoted."""
    spec = rollout["spec"]["template"]["spec"]
    settings = config.rollout
    options = [f"--{version}={host}:{HTTP_PORT}" for version, host in hosts.items()]
    options += [f"--name={config.name}", f"--min-requests={settings.min_requests}", f"--margin={settings.margin:g}"]
    container = {"name": "canary", **{field: spec["containers"][0][field] for field in _CONTAINER_FIELDS}}
    container |= {
        "command": ["python", "-m", "serve.canary"],
        "args": [*options, f"--observe-seconds={settings.observe_seconds}", *network.mounted_access(access).options],
        "resources": _RESOURCES,
    }
    if access.api_keys:  # the Secret of the pods has only hashes
        key = {"name": f"{config.name}-canary", "key": KEY_VARIABLE}
        container["env"] = [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": key}}]
    pod = {"restartPolicy": "Never", **{field: spec[field] for field in _POD_FIELDS if field in spec}}
    job = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": _START_SECONDS + OBSERVATION_ATTEMPTS * settings.observe_seconds,
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": labels}, "spec": {**pod, "containers": [container]}},
    }
    metric = {"name": "requests", "provider": {"job": {"spec": job}}}
    item = {"apiVersion": _API_VERSION, "kind": "AnalysisTemplate", "metadata": copy.deepcopy(rollout["metadata"])}
    return {**item, "spec": {"metrics": [metric]}}
