"""The objects that serve one bundle: a plain Deployment with its company, or a KServe InferenceService."""

from __future__ import annotations

import re
from typing import Any

from k8s import access
from k8s.manifest import BUNDLE_ANNOTATION, Object, ask_for_gpus, check_image, describe, identity, load
from pipeline.spec.access import ANYBODY, Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Deploy, Serve, watching

_QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")


def objects(config: Config, bundle: Bundle, image: str, entry: Access = ANYBODY) -> list[dict[str, Any]]:
    """In the order they are applied; the workload comes after what it leans on."""
    _check(config.deploy)
    _check_alone(config.serve)
    check_image(image)
    parts = load("serve" if config.deploy.mode == "deployment" else "kserve")
    for item in parts.values():
        labels = {**identity(config.name, "serving"), "app.kubernetes.io/version": bundle.digest[:12]}
        describe(item, config.name, config.deploy.namespace, labels, {BUNDLE_ANNOTATION: bundle.digest})
    selector = identity(config.name, "serving")
    parts["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] = selector
    parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] = selector
    order = ["ServiceAccount", "NetworkPolicy"]
    if config.deploy.mode == "deployment":
        _fill_deployment(parts, config, image, entry)
        order += ["Service", "Deployment", "HorizontalPodAutoscaler"]
    else:
        _fill_inference_service(parts["InferenceService"], config, image, entry)
        order += ["InferenceService"]
    return [parts[kind] for kind in [*order, "PodDisruptionBudget"]]


def service_name(config: Config) -> str:
    """The Service that stands before the pods; KServe names the one it makes itself."""
    return config.name if config.deploy.mode == "deployment" else f"{config.name}-predictor"


def _fill_deployment(parts: dict[str, Object], config: Config, image: str, entry: Access) -> None:
    selector = identity(config.name, "serving")
    deployment, autoscaler = parts["Deployment"], parts["HorizontalPodAutoscaler"]["spec"]
    deployment["spec"]["selector"]["matchLabels"] = selector
    template = deployment["spec"]["template"]
    template["metadata"] = _pod_metadata(deployment)
    _fill_pod(template["spec"], config, image, entry)
    parts["Service"]["spec"]["selector"] = selector
    autoscaler["scaleTargetRef"]["name"] = config.name
    autoscaler["minReplicas"] = config.deploy.replicas
    autoscaler["maxReplicas"] = config.deploy.max_replicas


def _fill_inference_service(service: Object, config: Config, image: str, entry: Access) -> None:
    predictor = service["spec"]["predictor"]
    predictor.update(_pod_metadata(service))
    predictor["minReplicas"] = config.deploy.replicas
    predictor["maxReplicas"] = config.deploy.max_replicas
    _fill_pod(predictor, config, image, entry)


def _pod_metadata(owner: Object) -> Object:
    """Pods carry their owner's labels and the bundle; what is meant for the owner's controller stays with it."""
    metadata = owner["metadata"]
    return {
        "labels": dict(metadata["labels"]),
        "annotations": {BUNDLE_ANNOTATION: metadata["annotations"][BUNDLE_ANNOTATION]},
    }


def _fill_pod(pod: Object, config: Config, image: str, entry: Access) -> None:
    deploy = config.deploy
    pod["serviceAccountName"] = config.name
    for spread in pod["topologySpreadConstraints"]:
        spread["labelSelector"]["matchLabels"] = identity(config.name, "serving")
    container = pod["containers"][0]
    container["image"] = image
    container["resources"] = {
        "requests": {"cpu": deploy.cpu, "memory": deploy.memory},
        "limits": {"memory": deploy.memory},
    }
    ask_for_gpus(pod, container, deploy.gpus)
    if options := watching(config.serve):
        container["args"] = options
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
    for key, value in (("cpu", deploy.cpu), ("memory", deploy.memory)):
        if not _QUANTITY.match(value):
            raise ConfigError(f"deploy.{key}: {value!r} is not a Kubernetes quantity; write it as in 500m or 512Mi")
    if not re.match(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", deploy.namespace):
        raise ConfigError(f"deploy.namespace: {deploy.namespace!r} is not a namespace name (a-z, 0-9 and -)")
