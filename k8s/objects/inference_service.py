"""KServe's InferenceService: our container, or KServe's storage with a ServingRuntime; plain, or with a canary."""

from __future__ import annotations

import copy
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, LABEL
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.stages import Deploy

_PLACE = "/mnt/models"  # where KServe puts what `storageUri` names
_COMMAND = ["python", "-m", "serve", _PLACE, "--host=0.0.0.0", "--port=8080", "--grpc-port=8081"]
_VERSION = "app.kubernetes.io/version"
_SCALING = ("autoScaling", "maxReplicas", "scaleMetric", "scaleMetricType", "scaleTarget", "containerConcurrency")


def layers(deploy: Deploy) -> list[str]:
    chosen = [] if deploy.sidecar else ["istio-free"]
    return [*chosen, *(["knative"] if deploy.kserve_mode == "Knative" else [])]


def fill(service: Object, deploy: Deploy) -> None:
    """Replicas and what they are scaled by."""
    predictor = service["spec"]["predictor"]
    predictor["minReplicas"], predictor["maxReplicas"] = deploy.replicas, deploy.max_replicas
    if deploy.kserve_mode == "Knative":
        predictor["scaleTarget"] = deploy.in_flight


def stored(parts: dict[str, Object], runtime: Object, deploy: Deploy, run: str) -> None:
    """The predictor's container becomes the runtime's, and the bundle comes by its URI instead of in the image.

    The URI of a bundle on the volume of the runs has the run's name in it, which is known when it is deployed.
    """
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    (container,) = predictor.pop("containers")
    runtime["spec"]["containers"] = [_for_any_bundle(container)]
    predictor["model"] = {
        "modelFormat": dict(_format(runtime)),
        "runtime": runtime["metadata"]["name"],
        "storageUri": deploy.storage_uri.replace("{run}", run),
    }
    parts["ServingRuntime"] = runtime
    if deploy.storage_secret:
        parts["ServiceAccount"]["secrets"] = [{"name": deploy.storage_secret}]


def _for_any_bundle(container: Object) -> Object:
    """In the order people read it: what it is, then how it is started."""
    head = {word: container[word] for word in ("name", "image", "imagePullPolicy")}
    return {**head, "command": list(_COMMAND), **{word: container[word] for word in container if word not in head}}


def _format(runtime: Object) -> dict[str, str]:
    found: dict[str, str] = runtime["spec"]["supportedModelFormats"][0]
    return found


def with_canary(candidate: Object, deploy: Deploy) -> Object:
    """The service in which the candidate gets a share of the requests, and the stable version the rest.

    Knative keeps the revision that served until now; in Standard mode both versions stand in the object.
    """
    split = copy.deepcopy(candidate)
    predictor = split["spec"]["predictor"]
    if deploy.kserve_mode == "Knative":
        predictor["canaryTrafficPercent"] = deploy.canary_percent
        return split
    split["spec"]["canary"] = [{"predictor": _variant(candidate), "trafficPercent": deploy.canary_percent}]
    predictor["model"]["storageUri"] = deploy.stable_uri
    del predictor["annotations"][BUNDLE_ANNOTATION], predictor["labels"][_VERSION]  # they are the candidate's
    return split


def check_host(config: Config) -> None:
    """KServe makes a host name of both names, and goes on trying for ever where it is too long."""
    host = f"{config.name}-predictor-{config.deploy.namespace}"
    if config.deploy.mode == "inferenceservice" and len(host) > LABEL:
        raise ConfigError(
            f"deploy.namespace: KServe makes the host name {host!r} of the model's name and the namespace, and such a "
            f"name has at most {LABEL} letters (this one {len(host)}); take a shorter one of them, or "
            "deploy.mode=deployment"
        )


def check(deploy: Deploy) -> None:
    """What KServe asks of a canary, before it does."""
    if not deploy.canary_percent:
        return
    if deploy.mode != "inferenceservice":
        raise ConfigError("deploy.canary_percent: is KServe's; set deploy.mode=inferenceservice")
    if not deploy.render:
        raise ConfigError(
            "deploy.canary_percent: golden requests cannot choose which version answers them; render the manifests "
            "(`pipe deploy --render`), apply them, and render them anew without it when the canary has done well"
        )
    stored = deploy.storage_uri and deploy.stable_uri and deploy.storage_uri != deploy.stable_uri
    if deploy.kserve_mode == "Standard" and not stored:
        raise ConfigError(
            "deploy.canary_percent: in Standard mode KServe tells the versions apart by where their bundles are "
            "stored; set deploy.storage_uri and deploy.stable_uri, or deploy.kserve_mode=Knative"
        )


def _variant(candidate: Object) -> dict[str, Any]:
    """A predictor with a name of its own and a fixed number of replicas: a canary is not scaled by itself."""
    predictor = {word: value for word, value in candidate["spec"]["predictor"].items() if word not in _SCALING}
    # The CRD asks for the container's name here, which the stable predictor does without.
    model = {"name": "kserve-container", **predictor["model"]}
    name = f"v-{predictor['annotations'][BUNDLE_ANNOTATION][:8]}"
    return copy.deepcopy({**predictor, "model": model, "name": name, "minReplicas": 1})
