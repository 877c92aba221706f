"""A Rollout of Argo Rollouts instead of the Deployment, and the Job that compares its canary with the stable pods."""

from __future__ import annotations

from collections.abc import Mapping

from k8s.objects import network
from k8s.objects.kustomize import Object
from k8s.objects.manifests import HTTP_PORT, identity_labels
from pipeline.contract.canary import OBSERVATION_ATTEMPTS, traffic_steps
from pipeline.contract.config import Config
from pipeline.contract.settings.access import KEY_VARIABLE, Access

_KIND = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout"}
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "securityContext", "volumeMounts")
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "128Mi"}}


def convert_deployment(parts: Mapping[str, Object], config: Config, access: Access) -> list[Object]:
    """Make the Deployment a Rollout; return it with the objects that it refers to.

    Its controller gives the two headless Services their selectors, and the HTTPRoute its weights.
    """
    rollout, settings = parts["Deployment"], config.rollout
    hosts = {f"{config.name}-stable": 100, f"{config.name}-canary": 0}  # weights while there is no canary
    objects = [_headless(parts["Service"], host, config) for host in hosts]
    strategy = dict(rollout["spec"]["strategy"]["rollingUpdate"])
    strategy |= dict(zip(("stableService", "canaryService"), hosts, strict=True))
    if settings.canary_percent:
        judge: Object = {"pause": {}}  # until a person promotes it
        if settings.auto:
            judge = {"analysis": {"templates": [{"templateName": config.name}]}}
            objects.append(_analysis_template(rollout, list(hosts), config, access))
        percents = traffic_steps(settings.canary_percent)[: None if settings.auto else 1]
        strategy["steps"] = [step for share in percents for step in ({"setWeight": int(share) or 1}, judge)]
    if "HTTPRoute" in parts:
        strategy["trafficRouting"] = {"plugins": {"argoproj-labs/gatewayAPI": {"httpRoute": config.name}}}
        for rule in parts["HTTPRoute"]["spec"]["rules"]:
            # In full, as the API server completes it: applying it again changes nothing.
            service = {"group": "", "kind": "Service", **rule["backendRefs"][0]}
            rule["backendRefs"] = [{**service, "name": host, "weight": weight} for host, weight in hosts.items()]
    rollout |= _KIND
    rollout["spec"] |= {"strategy": {"canary": strategy}, "progressDeadlineAbort": True}
    parts["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"] |= _KIND
    if config.deploy.clients:
        job_pods = {"podSelector": {"matchLabels": identity_labels(config.name, "canary")}}
        parts["NetworkPolicy"]["spec"]["ingress"][0]["from"].append(job_pods)
    return [*objects, rollout]


def _headless(service: Object, host: str, config: Config) -> Object:
    """Return a Service of one version's pods, with other labels, as Prometheus has the pods from that of all."""
    labels = {**service["metadata"]["labels"], **identity_labels(config.name, "canary")}
    spec = {field: value for field, value in service["spec"].items() if field != "selector"}
    metadata = {**service["metadata"], "name": host, "labels": labels}
    return {**service, "metadata": metadata, "spec": {**spec, "clusterIP": "None"}}


def _analysis_template(rollout: Object, hosts: list[str], config: Config, access: Access) -> Object:
    """Return a metric whose Job succeeds if the canary is to be promoted."""
    spec, settings = rollout["spec"]["template"]["spec"], config.rollout
    options = {
        "stable": f"{hosts[0]}:{HTTP_PORT}", "canary": f"{hosts[1]}:{HTTP_PORT}", "name": config.name,
        "min-requests": settings.min_requests, "margin": settings.margin, "observe-seconds": settings.observe_seconds,
    }  # fmt: skip
    container = {
        "name": "canary",
        "command": ["python", "-m", "serve.canary"],
        "args": [*(f"--{name}={value}" for name, value in options.items()), *network.mounted_access(access).options],
        "resources": _RESOURCES,
        **{field: spec["containers"][0][field] for field in _CONTAINER_FIELDS},
    }
    if access.api_keys:  # the Secret of the pods has only hashes
        key = {"name": f"{config.name}-canary", "key": KEY_VARIABLE}
        container["env"] = [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": key}}]
    pod = {
        "metadata": {"labels": identity_labels(config.name, "canary")},
        "spec": {**spec, "restartPolicy": "Never", "containers": [container]},
    }
    seconds = 600 + OBSERVATION_ATTEMPTS * settings.observe_seconds  # with the time to find a node and pull the image
    job = {"backoffLimit": 0, "activeDeadlineSeconds": seconds, "template": pod}
    metrics = [{"name": "requests", "provider": {"job": {"spec": job}}}]
    return {**_KIND, "kind": "AnalysisTemplate", "metadata": dict(rollout["metadata"]), "spec": {"metrics": metrics}}
