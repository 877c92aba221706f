"""The objects that serve one bundle: a plain Deployment with its company, or a KServe InferenceService."""

from __future__ import annotations

from typing import Any

from k8s import access, inference, options, placement, reach
from k8s.manifest import BUNDLE_ANNOTATION, Object, check_image, check_pinned, describe, identity, load
from pipeline.spec.access import ANYBODY, Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Deploy, Serve

_OCI = "oci://"
# What is leaned on comes before what leans on it.
_ORDER = (
    "ServiceAccount", "NetworkPolicy", "ConfigMap", "Service", "ServingRuntime", "Deployment", "InferenceService",
    "HorizontalPodAutoscaler", "PodDisruptionBudget", "HTTPRoute", "Ingress", "ServiceMonitor",
)  # fmt: skip


def objects(config: Config, bundle: Bundle, image: str, entry: Access = ANYBODY) -> list[dict[str, Any]]:
    """In the order they are applied."""
    _check(config.deploy)
    inference.check_host(config)
    _check_alone(config.serve)
    check_image(image)
    parts = _loaded(config)
    for kind, item in parts.items():
        labels = {**identity(config.name, "serving"), "app.kubernetes.io/version": bundle.digest[:12]}
        name = options.name_of(config) if kind == "ConfigMap" else config.name
        describe(item, name, config.deploy.namespace, labels, {BUNDLE_ANNOTATION: bundle.digest})
    options.fill(parts["ConfigMap"], config, bundle, entry)
    reach.fill_policy(parts["NetworkPolicy"], config)
    reach.fill_routes(parts, config, bundle.signature.limits.max_body_bytes)
    parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] = identity(config.name, "serving")
    runtime = parts.pop("ServingRuntime", None)
    if config.deploy.mode == "deployment":
        _fill_deployment(parts, config, image, entry)
    else:
        _fill_inference_service(parts, config, image, entry)
    if runtime is not None:
        inference.stored(parts, runtime, config.deploy, bundle.path.absolute().parents[1].name)
    if config.deploy.canary_percent:
        parts["InferenceService"] = inference.with_canary(parts["InferenceService"], config.deploy)
    return [parts[kind] for kind in _ORDER if kind in parts]


def service_name(config: Config) -> str:
    """The Service that stands before the pods; KServe names the one it makes itself."""
    return config.name if config.deploy.mode == "deployment" else f"{config.name}-predictor"


def _loaded(config: Config) -> dict[str, Object]:
    """The folder's own objects, and the components that the configuration asks for."""
    deploy = config.deploy
    placed = placement.layers(deploy.gpus, deploy)
    if deploy.mode == "deployment":
        return load("serve", [*placed, *reach.layers(deploy)])
    parts = load("kserve", [*placed, *inference.layers(deploy)])
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
    reach.fill_door(parts, config.deploy, entry)
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
    inference.fill(service, config.deploy)
    _fill_pod(predictor, config, image, entry)


def _pod_metadata(own: Object, owner: Object, settings: Object) -> Object:
    """Pods carry their owner's labels and the bundle; what is meant for the owner's controller stays with it."""
    metadata = owner["metadata"]
    notes = {
        BUNDLE_ANNOTATION: metadata["annotations"][BUNDLE_ANNOTATION],
        options.OPTIONS_ANNOTATION: options.digest(settings),
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
    placement.place(pod, container, deploy.gpus, deploy)
    options.refer(container, options.name_of(config), config)
    access.fill(pod, config, entry)


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
    reach.check(deploy)
    inference.check(deploy)
