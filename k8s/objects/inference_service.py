"""The KServe InferenceService: with our container or with a ServingRuntime and KServe's storage, and its canaries."""

from __future__ import annotations

import copy
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, MAX_LABEL
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.stages import Deploy

_KNATIVE_CONCURRENCY = 8  # requests in flight per pod, where `deploy.target_concurrency` is not set
_MODEL_FOLDER = "/mnt/models"  # where KServe mounts the files of `storageUri`
_COMMAND = ["python", "-m", "serve", _MODEL_FOLDER, "--host=0.0.0.0", "--port=8080", "--grpc-port=8081"]
_VERSION_LABEL = "app.kubernetes.io/version"
_SCALING_FIELDS = (
    "autoScaling", "maxReplicas", "scaleMetric", "scaleMetricType", "scaleTarget", "containerConcurrency",
)  # fmt: skip


def components(deploy: Deploy) -> list[str]:
    return ["knative"] if deploy.by_knative else []


def set_replicas(service: Object, deploy: Deploy) -> None:
    """Set the number of replicas, and the target that Knative scales by."""
    predictor = service["spec"]["predictor"]
    predictor["minReplicas"], predictor["maxReplicas"] = deploy.min_replicas, deploy.max_replicas
    if deploy.by_knative:
        predictor["scaleTarget"] = deploy.target_concurrency or _KNATIVE_CONCURRENCY


def use_storage(parts: dict[str, Object], runtime: Object, deploy: Deploy, run: str) -> None:
    """Move the predictor's container into the runtime; the bundle comes from its URI instead of the image.

    `{run}` in the URI, as for a bundle on the volume of the runs, is replaced by the run's name.
    """
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    (container,) = predictor.pop("containers")
    runtime["spec"]["containers"] = [_runtime_container(container)]
    predictor["model"] = {
        "modelFormat": dict(_model_format(runtime)),
        "runtime": runtime["metadata"]["name"],
        "storageUri": deploy.storage_uri.replace("{run}", run),
    }
    parts["ServingRuntime"] = runtime
    if deploy.storage_secret:
        parts["ServiceAccount"]["secrets"] = [{"name": deploy.storage_secret}]


def _runtime_container(container: Object) -> Object:
    """Add the command that serves the mounted bundle, after the image."""
    head = {field: container[field] for field in ("name", "image", "imagePullPolicy")}
    return {**head, "command": list(_COMMAND), **{field: container[field] for field in container if field not in head}}


def _model_format(runtime: Object) -> dict[str, str]:
    model_format: dict[str, str] = runtime["spec"]["supportedModelFormats"][0]
    return model_format


def with_canary(candidate: Object, config: Config) -> Object:
    """Return a service that sends a percentage of the requests to the candidate, and the rest to the stable version.

    Knative keeps the stable revision itself; in Standard mode the object describes both versions.
    """
    percent = int(config.rollout.canary_percent)
    split = copy.deepcopy(candidate)
    predictor = split["spec"]["predictor"]
    if config.deploy.by_knative:
        predictor["canaryTrafficPercent"] = percent
        return split
    split["spec"]["canary"] = [{"predictor": _canary_predictor(candidate), "trafficPercent": percent}]
    predictor["model"]["storageUri"] = config.deploy.stable_storage_uri
    del predictor["annotations"][BUNDLE_ANNOTATION], predictor["labels"][_VERSION_LABEL]  # those of the candidate
    return split


def check_host(config: Config) -> None:
    """Check the length of KServe's host name: KServe would retry a name that is too long for ever."""
    host = f"{config.name}-predictor-{config.deploy.namespace}"
    if config.deploy.by_kserve and len(host) > MAX_LABEL:
        raise ConfigError(
            f"deploy.namespace: KServe derives the host name {host!r} from the model's name and the namespace, and it "
            f"has {len(host)} characters, but at most {MAX_LABEL} are allowed; shorten one of the names, or set "
            "deploy.target=kubernetes"
        )


def check_canary(config: Config) -> None:
    """Check what KServe requires of a canary that is in its object."""
    deploy, percent = config.deploy, config.rollout.canary_percent
    if not percent or not deploy.by_kserve:
        return
    if percent != int(percent):
        raise ConfigError(f"rollout.canary_percent={percent:g}: KServe takes whole numbers")
    if deploy.by_knative:
        return
    if not deploy.render:
        raise ConfigError(
            "rollout.canary_percent: in KServe's Standard mode no request can choose the version, so golden requests "
            "cannot check it; set deploy.target=kserve-knative or deploy.target=kubernetes, or render the manifests "
            "(`pipe deploy --render`), apply them, and render them again without it when the canary has proved good"
        )
    uris = (deploy.storage_uri, deploy.stable_storage_uri)
    if not all(uris) or uris[0] == uris[1]:
        raise ConfigError(
            "rollout.canary_percent: in Standard mode KServe distinguishes the versions by where their bundles are "
            "stored; set deploy.storage_uri and deploy.stable_storage_uri, or deploy.target=kserve-knative"
        )


def _canary_predictor(candidate: Object) -> dict[str, Any]:
    """Return the canary's predictor, with its own name and one replica: KServe does not scale canaries."""
    predictor = {name: value for name, value in candidate["spec"]["predictor"].items() if name not in _SCALING_FIELDS}
    # The CRD requires the container's name here, but not in the stable predictor.
    model = {"name": "kserve-container", **predictor["model"]}
    name = f"v-{predictor['annotations'][BUNDLE_ANNOTATION][:8]}"
    return copy.deepcopy({**predictor, "model": model, "name": name, "minReplicas": 1})
