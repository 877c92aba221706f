"""Objects that serve one bundle: a Deployment with Service, autoscaler and so on, or a KServe InferenceService."""

from __future__ import annotations

from typing import Any

from k8s.objects import config_map, inference_service, network, training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    BUNDLE_ANNOTATION,
    check_image,
    check_pinned,
    identity_labels,
    load_manifests,
    set_metadata,
)
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.stages import Serve

_OCI = "oci://"
# Objects come after those they refer to.
_ORDER = (
    "ServiceAccount", "NetworkPolicy", "ConfigMap", "Service", "ServingRuntime", "Deployment", "InferenceService",
    "HorizontalPodAutoscaler", "PodDisruptionBudget", "HTTPRoute", "Ingress", "ServiceMonitor",
)  # fmt: skip


def serving_objects(config: Config, bundle: Bundle, image: str, access: Access = OPEN_ACCESS) -> list[dict[str, Any]]:
    """Return all objects in the order they are applied."""
    _check_settings(config)
    check_image(image)
    parts = _load_parts(config)
    for kind, item in parts.items():
        labels = {**identity_labels(config.name, "serving"), "app.kubernetes.io/version": bundle.digest[:12]}
        name = config_map.config_map_name(config) if kind == "ConfigMap" else config.name
        set_metadata(item, name, config.deploy.namespace, labels, {BUNDLE_ANNOTATION: bundle.digest})
    config_map.fill_config_map(parts["ConfigMap"], config, bundle, access)
    network.fill_policy(parts["NetworkPolicy"], config)
    network.fill_routes(parts, config, bundle.signature.limits.max_body_bytes)
    parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] = identity_labels(config.name, "serving")
    runtime = parts.pop("ServingRuntime", None)
    if config.deploy.by_kserve:
        _fill_inference_service(parts, config, image, access)
    else:
        _fill_deployment(parts, config, image, access)
    if runtime is not None:
        inference_service.use_storage(parts, runtime, config.deploy, bundle.path.absolute().parents[1].name)
    if config.deploy.by_kserve and config.deploy.render and config.rollout.canary_percent:
        parts["InferenceService"] = inference_service.with_canary(parts["InferenceService"], config)
    return [parts[kind] for kind in _ORDER if kind in parts]


def service_name(config: Config) -> str:
    """Return the name of the Service of the pods; KServe names its own."""
    return f"{config.name}-predictor" if config.deploy.by_kserve else config.name


def _load_parts(config: Config) -> dict[str, Object]:
    """Load the base and the components that the configuration needs."""
    deploy = config.deploy
    nodes = training.node_components(deploy.gpus, deploy)
    if not deploy.by_kserve:
        return load_manifests("serve", [*nodes, *network.components(deploy)])
    parts = load_manifests("kserve", [*nodes, *inference_service.components(deploy)])
    if deploy.storage_uri:
        parts["ServingRuntime"] = load_manifests("kserve", ["storage"])["ServingRuntime"]
    return parts


def _fill_deployment(parts: dict[str, Object], config: Config, image: str, access: Access) -> None:
    selector = identity_labels(config.name, "serving")
    deployment, autoscaler = parts["Deployment"], parts["HorizontalPodAutoscaler"]["spec"]
    deployment["spec"]["selector"]["matchLabels"] = selector
    template = deployment["spec"]["template"]
    template["metadata"] = _pod_metadata(template["metadata"], deployment, parts["ConfigMap"])
    _fill_pod(template["spec"], config, image, access)
    parts["Service"]["spec"]["selector"] = selector
    network.fill_security(parts, config.deploy, access)
    autoscaler["scaleTargetRef"]["name"] = config.name
    autoscaler["minReplicas"] = config.deploy.min_replicas
    autoscaler["maxReplicas"] = config.deploy.max_replicas
    for metric in autoscaler["metrics"]:
        if metric["type"] == "Pods":
            metric["pods"]["target"]["averageValue"] = str(config.deploy.target_concurrency)


def _fill_inference_service(parts: dict[str, Object], config: Config, image: str, access: Access) -> None:
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    predictor.update(_pod_metadata(predictor, service, parts["ConfigMap"]))
    inference_service.set_replicas(service, config.deploy)
    _fill_pod(predictor, config, image, access)


def _pod_metadata(own: Object, owner: Object, settings: Object) -> Object:
    """Give pods their owner's labels, and the annotations whose change must roll the pods out again."""
    metadata = owner["metadata"]
    annotations = {
        BUNDLE_ANNOTATION: metadata["annotations"][BUNDLE_ANNOTATION],
        config_map.OPTIONS_ANNOTATION: config_map.options_digest(settings),
    }
    return {"labels": {**own["labels"], **metadata["labels"]}, "annotations": annotations}


def _fill_pod(pod: Object, config: Config, image: str, access: Access) -> None:
    deploy = config.deploy
    pod["serviceAccountName"] = config.name
    for spread in pod.get("topologySpreadConstraints", []):
        spread["labelSelector"]["matchLabels"] = identity_labels(config.name, "serving")
    container = pod["containers"][0]
    container["image"] = image
    container["resources"] = {
        "requests": {"cpu": deploy.cpu, "memory": deploy.memory},
        "limits": {"memory": deploy.memory},
    }
    training.set_node_placement(pod, container, deploy.gpus, deploy, deploy.image_pull_secret)
    config_map.refer_to_config_map(container, config_map.config_map_name(config), config)
    network.mount_access(pod, config, access)


def _check_settings(config: Config) -> None:
    deploy = config.deploy
    if deploy.max_replicas < deploy.min_replicas:
        raise ConfigError(
            f"deploy.max_replicas is {deploy.max_replicas}, below deploy.min_replicas ({deploy.min_replicas}); raise it"
        )
    if deploy.storage_uri and not deploy.by_kserve:
        raise ConfigError("deploy.storage_uri: only KServe fetches bundles; set deploy.target=kserve")
    for setting in ("storage_uri", "stable_storage_uri"):
        uri = getattr(deploy, setting)
        if uri.startswith(_OCI):
            check_pinned(uri.removeprefix(_OCI), f"deploy.{setting}")
    _check_local_settings(config.serve)
    network.check_settings(deploy)
    inference_service.check_host(config)
    inference_service.check_canary(config)


def _check_local_settings(serve: Serve) -> None:
    """A pod has only the bundle of its image, so it cannot run a second one next to it."""
    if serve.shadow:
        raise ConfigError("serve.shadow: is for the local service; leave it out: on a cluster a mesh mirrors requests")
