"""Invariants of all objects, whatever the configuration: security, ports, probes, selectors, options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from serve.options import parse_options
from serve.routes import find_route

Object = dict[str, Any]
DRAIN_SECONDS = 25  # the grace period for accepted requests in serve/process/server.py


def check(objects: Sequence[Object]) -> None:
    """Check all invariants of a set of objects that is applied together."""
    parts = {item["kind"]: item for item in objects}
    assert len(parts) == len(objects), "each kind once"
    text = json.dumps(objects)
    assert ":latest" not in text
    check_pods(objects)
    if served := [item for item in objects if item["kind"] in ("Deployment", "InferenceService")]:
        _check_serving(parts, served[0])
    if "Job" in parts and parts["Job"]["metadata"]["labels"]["app.kubernetes.io/component"] == "training":
        _check_job(parts["Job"], parts["Service"])
    if "JobSet" in parts:
        _check_jobset(parts["JobSet"]["spec"])
    if "TrainingRuntime" in parts:
        _check_jobset(parts["TrainingRuntime"]["spec"]["template"]["spec"])


def check_pods(objects: Sequence[Object]) -> None:
    for pod in pods(objects):
        _check_security(pod)
        _check_mounts(pod)


def pods(objects: Sequence[Object]) -> Iterator[Object]:
    """Yield every pod spec; that of an InferenceService is merged with its ServingRuntime."""
    runtime: Object = next((item["spec"] for item in objects if item["kind"] == "ServingRuntime"), {})
    for item in objects:
        if item["kind"] == "InferenceService":
            yield {**runtime, **item["spec"]["predictor"]}
        elif item["kind"] != "ServingRuntime":
            yield from _pods_in(item)


def _pods_in(value: Any) -> Iterator[Object]:
    if isinstance(value, list):
        for item in value:
            yield from _pods_in(item)
    elif isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for inner in value.values():
                yield from _pods_in(inner)


def _check_security(pod: Object) -> None:
    """Check the Pod Security Standard `restricted` and a read-only root file system."""
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container["securityContext"]
        both = {**pod.get("securityContext", {}), **own}
        assert (both["runAsNonRoot"], both["runAsUser"] > 0) == (True, True)
        assert both["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        names = [entry["name"] for entry in container.get("env", [])]
        assert len(set(names)) == len(names), "the API server warns of a variable that hides another"
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])


def _check_mounts(pod: Object) -> None:
    there = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= there


def _check_serving(parts: dict[str, Object], owner: Object) -> None:
    (pod,) = pods([item for kind, item in parts.items() if kind != "CronJob"])
    (container,) = pod["containers"]
    labels = owner["spec"]["template"]["metadata"]["labels"] if owner["kind"] == "Deployment" else pod["labels"]
    for selector in _selectors(parts, pod):
        assert selector
        assert selector.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    _check_probes(container, ports)
    _check_drain(pod, container)
    allowed = {port["port"] for port in parts["NetworkPolicy"]["spec"]["ingress"][0]["ports"]}
    assert allowed == set(ports.values())
    _check_options(container, parts["ConfigMap"])
    assert pod["serviceAccountName"] == parts["ServiceAccount"]["metadata"]["name"]
    assert parts["ServiceAccount"]["automountServiceAccountToken"] is False
    assert parts["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    _check_budget(parts, owner)
    if owner["kind"] == "Deployment":
        _check_exposure(parts, ports)
    elif "ServingRuntime" in parts:
        assert owner["spec"]["predictor"]["model"]["runtime"] == parts["ServingRuntime"]["metadata"]["name"]


def _selectors(parts: dict[str, Object], pod: Object) -> Iterator[dict[str, str]]:
    yield parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    yield parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    for spread in pod.get("topologySpreadConstraints", []):
        yield spread["labelSelector"]["matchLabels"]
    if "Deployment" in parts:
        yield parts["Deployment"]["spec"]["selector"]["matchLabels"]
        yield parts["Service"]["spec"]["selector"]
    if "ServiceMonitor" in parts:
        yield parts["ServiceMonitor"]["spec"]["selector"]["matchLabels"]


def _check_probes(container: Object, ports: dict[str, int]) -> None:
    """Probes use paths of the service, and its health port or one of the container."""
    health = next((int(word.rpartition("=")[2]) for word in container["args"] if word.startswith("--health-port=")), 0)
    assert {"readinessProbe", "livenessProbe"} <= set(container)
    for name, kind in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        if name in container:
            probe = container[name]["httpGet"]
            assert find_route(probe["path"], "GET").kind == kind
            assert probe["port"] in {*ports, *ports.values(), health}


def _check_drain(pod: Object, container: Object) -> None:
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause > 0
    assert pod["terminationGracePeriodSeconds"] >= pause + DRAIN_SECONDS


def _check_options(container: Object, settings: Object) -> None:
    """The service accepts the command line with the values of the ConfigMap."""
    assert container["envFrom"][0]["configMapRef"]["name"] == settings["metadata"]["name"]
    words = [re.sub(r"\$\((\w+)\)", lambda found: settings["data"][found[1]], word) for word in container["args"]]
    parse_options([*(container["command"][3:] if "command" in container else ["/bundle"]), *words])


def _check_budget(parts: dict[str, Object], owner: Object) -> None:
    """A pod can be evicted at the minimum number of replicas."""
    assert parts["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    if owner["kind"] == "InferenceService":
        predictor = owner["spec"]["predictor"]
        assert 1 <= predictor["minReplicas"] <= predictor["maxReplicas"]
        return
    kind, fields = "HorizontalPodAutoscaler", ("minReplicas", "maxReplicas")
    if "ScaledObject" in parts:
        assert kind not in parts, "KEDA makes it"
        kind, fields = "ScaledObject", ("minReplicaCount", "maxReplicaCount")
    scaler = parts[kind]["spec"]
    assert "replicas" not in owner["spec"], "the autoscaler owns the number"
    assert scaler["scaleTargetRef"] == {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
    }
    assert 1 <= scaler[fields[0]] <= scaler[fields[1]]
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    startup = container["startupProbe"]
    assert owner["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    strategy = owner["spec"]["strategy"]["rollingUpdate"]
    assert (strategy["maxUnavailable"], strategy["maxSurge"]) == (0, 1), (
        "the old version answers until the new one does"
    )


def _check_exposure(parts: dict[str, Object], ports: dict[str, int]) -> None:
    service = parts["Service"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    reached = {(service["metadata"]["name"], port) for port in (*ports, *ports.values())}
    if "HTTPRoute" in parts:
        for rule in parts["HTTPRoute"]["spec"]["rules"]:
            assert {(ref["name"], ref["port"]) for ref in rule["backendRefs"]} <= reached
    if "Ingress" in parts:
        for path in parts["Ingress"]["spec"]["rules"][0]["http"]["paths"]:
            backend = path["backend"]["service"]
            assert (backend["name"], backend["port"]["name"]) in reached
    if "ServiceMonitor" in parts:
        (endpoint,) = parts["ServiceMonitor"]["spec"]["endpoints"]
        assert endpoint["port"] in ports
        assert find_route(endpoint["path"], "GET").kind == "metrics"


def _check_jobset(spec: Object) -> None:
    """Check what JobSet's webhook requires beyond the schema, and that failures end the set."""
    (rule,) = spec["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert rule["action"] == "FailJobSet"
    assert set(rule["onJobFailureReasons"]) == {"PodFailurePolicy", "DeadlineExceeded"}
    (job,) = spec["replicatedJobs"]
    inner = job["template"]["spec"]
    (container,) = inner["template"]["spec"]["containers"]
    named = {
        rule["onExitCodes"]["containerName"] for rule in inner["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert named == {container["name"]}
    assert "subdomain" not in inner["template"]["spec"], "JobSet gives it"
    assert spec["network"]["publishNotReadyAddresses"] is True


def _check_job(job: Object, service: Object) -> None:
    spec = job["spec"]
    template = spec["template"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] > 0
    assert spec["activeDeadlineSeconds"] > 0
    assert "ttlSecondsAfterFinished" in spec
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert len(f"{job['metadata']['name']}-{spec['completions']}") <= 63
