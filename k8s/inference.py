"""KServe's InferenceService: our container, or KServe's storage with a ServingRuntime; plain, or with a canary."""

from __future__ import annotations

import copy
from typing import Any

from k8s.manifest import BUNDLE_ANNOTATION, Object
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Deploy

_PLACE = "/mnt/models"  # where KServe puts what `storageUri` names
_COMMAND = ["python", "-m", "serve", _PLACE, "--host=0.0.0.0", "--port=8080", "--grpc-port=8081"]
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


def stored(parts: dict[str, Object], runtime: Object, deploy: Deploy) -> None:
    """The predictor's container becomes the runtime's, and the bundle comes by its URI instead of in the image."""
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    (container,) = predictor.pop("containers")
    runtime["spec"]["containers"] = [_for_any_bundle(container)]
    predictor["model"] = {
        "modelFormat": dict(_format(runtime)),
        "runtime": runtime["metadata"]["name"],
        "storageUri": deploy.storage_uri,
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


def with_canary(stable: Object, candidate: Object, percent: int) -> Object:
    """The service in which the candidate gets a share of the requests, and the stable version the rest.

    Knative keeps the revision that served until now; in Standard mode both versions stand in the object.
    """
    if not 0 <= percent <= 100:
        raise ConfigError(f"a canary gets 0 to 100 per cent of the requests, not {percent}")
    if candidate["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Knative":
        split = copy.deepcopy(candidate)
        split["spec"]["predictor"]["canaryTrafficPercent"] = percent
        return split
    split = copy.deepcopy(stable)
    split["spec"]["canary"] = [{"predictor": _variant(candidate), "trafficPercent": percent}]
    return split


def promoted(candidate: Object) -> Object:
    """All requests go to the candidate; in Standard mode its pods stay the ones they are, by their name."""
    service = copy.deepcopy(candidate)
    predictor = service["spec"]["predictor"]
    if service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Standard":
        _check_stored(predictor)
        predictor["name"] = _variant_name(predictor)
    return service


def _variant(candidate: Object) -> dict[str, Any]:
    """A predictor with a name of its own and a fixed number of replicas: a canary is not scaled by itself."""
    predictor = {word: value for word, value in candidate["spec"]["predictor"].items() if word not in _SCALING}
    _check_stored(predictor)
    if "model" in predictor:  # the CRD asks for the container's name here, which the stable predictor does without
        predictor["model"] = {"name": "kserve-container", **predictor["model"]}
    return copy.deepcopy({**predictor, "name": _variant_name(predictor), "minReplicas": 1})


def _check_stored(predictor: Object) -> None:
    containers = predictor.get("containers", [])
    named = any(entry["name"] == "STORAGE_URI" for item in containers for entry in item.get("env", []))
    if "model" not in predictor and not named:
        raise ConfigError(
            "a KServe canary in Standard mode is told from the stable version by where its bundle is stored; set "
            "deploy.storage_uri, or deploy.kserve_mode=Knative, or deploy.mode=deployment"
        )


def _variant_name(predictor: Object) -> str:
    digest: str = predictor["annotations"][BUNDLE_ANNOTATION]
    return f"v-{digest[:8]}"
