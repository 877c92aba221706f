"""The objects that serve one bundle: a plain Deployment with its company, or a KServe InferenceService."""

from __future__ import annotations

from typing import Any

from k8s.objects import config_map, inference_service, network, training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, check_image, check_pinned, describe, identity, load
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.access import ANYBODY, Access
from pipeline.contract.settings.stages import Deploy, Serve

_OCI = "oci://"
# What is leaned on comes before what leans on it.
_ORDER = (
    "ServiceAccount", "NetworkPolicy", "ConfigMap", "Service", "ServingRuntime", "Deployment", "InferenceService",
    "HorizontalPodAutoscaler", "PodDisruptionBudget", "HTTPRoute", "Ingress", "ServiceMonitor",
)  # fmt: skip


def objects(config: Config, bundle: Bundle, image: str, entry: Access = ANYBODY) -> list[dict[str, Any]]:
    """In the order they are applied."""
    _check(config.deploy)
    inference_service.check_host(config)
    _check_alone(config.serve)
    check_image(image)
    parts = _loaded(config)
    for kind, item in parts.items():
        labels = {**identity(config.name, "serving"), "app.kubernetes.io/version": bundle.digest[:12]}
        name = config_map.name_of(config) if kind == "ConfigMap" else config.name
        describe(item, name, config.deploy.namespace, labels, {BUNDLE_ANNOTATION: bundle.digest})
    config_map.fill(parts["ConfigMap"], config, bundle, entry)
    network.fill_policy(parts["NetworkPolicy"], config)
    network.fill_routes(parts, config, bundle.signature.limits.max_body_bytes)
    parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] = identity(config.name, "serving")
    runtime = parts.pop("ServingRuntime", None)
    if config.deploy.mode == "deployment":
        _fill_deployment(parts, config, image, entry)
    else:
        _fill_inference_service(parts, config, image, entry)
    if runtime is not None:
        inference_service.stored(parts, runtime, config.deploy, bundle.path.absolute().parents[1].name)
    if config.deploy.canary_percent:
        parts["InferenceService"] = inference_service.with_canary(parts["InferenceService"], config.deploy)
    return [parts[kind] for kind in _ORDER if kind in parts]


def service_name(config: Config) -> str:
    """The Service that stands before the pods; KServe names the one it makes itself."""
    return config.name if config.deploy.mode == "deployment" else f"{config.name}-predictor"


def _loaded(config: Config) -> dict[str, Object]:
    """The folder's own objects, and the components that the configuration asks for."""
    deploy = config.deploy
    placed = training.layers(deploy.gpus, deploy)
    if deploy.mode == "deployment":
        return load("serve", [*placed, *network.layers(deploy)])
    parts = load("kserve", [*placed, *inference_service.layers(deploy)])
    if deploy.storage_uri:
        parts["ServingRuntime"] = load("kserve", ["storage"])["ServingRuntime"]
    return parts


def _fill_deployment(parts: dict[str, Object], config: Config, image: str, entry: Access) -> None:
    selector = identity(config.name, "serving")
    deployment, autoscaler = parts["Deployment"], parts["HorizontalPodAutoscaler"]["spec"]
    deployment["spec"]["selector"]["matchLabels"] = selector
    template = deployment["spec"]["template"]
    template["metadata"] = _pod_metadata(template["metadata"], deployment, parts["ConfigMap"])
    _fill_pod(template["spec"], config, image, entry)
    parts["Service"]["spec"]["selector"] = selector
    network.fill_door(parts, config.deploy, entry)
    autoscaler["scaleTargetRef"]["name"] = config.name
    autoscaler["minReplicas"] = config.deploy.replicas
    autoscaler["maxReplicas"] = config.deploy.max_replicas
    for metric in autoscaler["metrics"]:
        if metric["type"] == "Pods":
            metric["pods"]["target"]["averageValue"] = str(config.deploy.in_flight)


def _fill_inference_service(parts: dict[str, Object], config: Config, image: str, entry: Access) -> None:
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    predictor.update(_pod_metadata(predictor, service, parts["ConfigMap"]))
    inference_service.fill(service, config.deploy)
    _fill_pod(predictor, config, image, entry)


def _pod_metadata(own: Object, owner: Object, settings: Object) -> Object:
    """Pods carry their owner's labels and the bundle; what is meant for the owner's controller stays with it."""
    metadata = owner["metadata"]
    notes = {
        BUNDLE_ANNOTATION: metadata["annotations"][BUNDLE_ANNOTATION],
        config_map.OPTIONS_ANNOTATION: config_map.digest(settings),
    }
    return {"labels": {**own["labels"], **metadata["labels"]}, "annotations": notes}


def _fill_pod(pod: Object, config: Config, image: str, entry: Access) -> None:
    deploy = config.deploy
    pod["serviceAccountName"] = config.name
    for spread in pod.get("topologySpreadConstraints", []):
        spread["labelSelector"]["matchLabels"] = identity(config.name, "serving")
    container = pod["containers"][0]
    container["image"] = image
    container["resources"] = {
        "requests": {"cpu": deploy.cpu, "memory": deploy.memory},
        "limits": {"memory": deploy.memory},
    }
    training.place(pod, container, deploy.gpus, deploy)
    config_map.refer(container, config_map.name_of(config), config)
    network.fill(pod, config, entry)


def _check_alone(serve: Serve) -> None:
    """A pod has the one bundle of its image; a second one would have no place to come from."""
    for word in ("canary", "shadow"):
        if getattr(serve, word):
            raise ConfigError(
                f"serve.{word}: is for the local service; on a cluster a share of the traffic is the mesh's "
                "or KServe's (canaryTrafficPercent) to give; leave it out"
            )


def _check(deploy: Deploy) -> None:
    if deploy.max_replicas < deploy.replicas:
        raise ConfigError(
            f"deploy.max_replicas is {deploy.max_replicas}, below deploy.replicas ({deploy.replicas}); raise it"
        )
    if deploy.storage_uri and deploy.mode != "inferenceservice":
        raise ConfigError("deploy.storage_uri: only KServe fetches bundles; set deploy.mode=inferenceservice")
    for word, uri in (("deploy.storage_uri", deploy.storage_uri), ("deploy.stable_uri", deploy.stable_uri)):
        if uri.startswith(_OCI):
            check_pinned(uri.removeprefix(_OCI), word)
    network.check(deploy)
    inference_service.check(deploy)
