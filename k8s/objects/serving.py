"""Objects that serve one bundle: a Deployment with Service and autoscaler, or a KServe InferenceService.

An InferenceService runs our container, or a ServingRuntime with KServe's storage.
"""

from __future__ import annotations

import math
from pathlib import Path

from k8s.objects import network, training
from k8s.objects.argo_rollouts import convert_deployment
from k8s.objects.jobs import monitor_job
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    BUNDLE_ANNOTATION,
    MAX_JOB_NAME,
    MAX_LABEL,
    OPTIONS_ANNOTATION,
    check_image,
    check_pinned,
    count_threads,
    count_workers,
    fill_config_map,
    fit_name,
    identity_labels,
    load_manifests,
    name_config_map,
    refer_to_config_map,
    set_metadata,
)
from k8s.objects.overlay import apply_overlay
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS, Access
from pipeline.contract.settings.stages import Deploy
from pipeline.contract.signature import MAX_SCORES_BYTES, SCORE_BYTES, Generation, Signature
from pipeline.system.errors import ConfigError

_OCI = "oci://"
# Objects come after those they refer to.
_ORDER = (
    "ServiceAccount", "NetworkPolicy", "ConfigMap", "Service", "ServingRuntime", "Deployment", "InferenceService",
    "HorizontalPodAutoscaler", "PodDisruptionBudget", "HTTPRoute", "Ingress", "CronJob",
)  # fmt: skip


def serving_objects(
    config: Config, bundle: Bundle, image: str, access: Access = OPEN_ACCESS, overlay: Path | None = None
) -> list[Object]:
    """Return all objects in the order they are applied, with the project's overlay."""
    _check_settings(config)
    check_image(image)
    run, parts = bundle.path.absolute().parents[1], _load_parts(config)
    if config.monitor.every:
        parts["CronJob"] = monitor_job(config, run)
    for kind, item in parts.items():
        labels = {**identity_labels(config.name, "serving"), "app.kubernetes.io/version": bundle.digest[:12]}
        if kind != "ConfigMap":  # several versions may share it
            name = fit_name(f"{config.name}-monitor", MAX_JOB_NAME) if kind == "CronJob" else config.name
            set_metadata(item, name, config.deploy.namespace, labels, {BUNDLE_ANNOTATION: bundle.digest})
    fill_config_map(parts["ConfigMap"], config, bundle, access)
    name_config_map(parts["ConfigMap"], config, network.secret_name(config, access))
    network.fill_policy(parts["NetworkPolicy"], config)
    network.fill_routes(parts, config, bundle.signature.limits.max_body_bytes)
    parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] = identity_labels(config.name, "serving")
    runtime = parts.pop("ServingRuntime", None)
    if config.deploy.by_kserve:
        _fill_inference_service(parts, config, bundle, image, access)
    else:
        _fill_deployment(parts, config, bundle, image, access)
    if runtime is not None:
        use_storage(parts, runtime, config.deploy, run.name)
    objects = [parts[kind] for kind in _ORDER if kind in parts]
    if config.rollout.controller == "argo-rollouts":
        i = objects.index(parts["Deployment"])
        objects[i : i + 1] = convert_deployment(parts, config, access)
    return objects if overlay is None else apply_overlay(objects, overlay, config)


def service_name(config: Config) -> str:
    """Return the name of the Service of the pods; KServe names its own."""
    return f"{config.name}-predictor" if config.deploy.by_kserve else config.name


def _load_parts(config: Config) -> dict[str, Object]:
    """Load the base and the components that the configuration needs."""
    deploy = config.deploy
    nodes = training.node_component(deploy.gpus)
    if not deploy.by_kserve:
        return load_manifests("serve", [nodes, *network.components(deploy)])
    parts = load_manifests("kserve", [nodes])
    if deploy.storage_uri:
        parts["ServingRuntime"] = load_manifests("kserve", ["storage"])["ServingRuntime"]
    return parts


def _fill_deployment(parts: dict[str, Object], config: Config, bundle: Bundle, image: str, access: Access) -> None:
    selector = identity_labels(config.name, "serving")
    deployment = parts["Deployment"]
    deployment["spec"]["selector"]["matchLabels"] = selector
    template = deployment["spec"]["template"]
    template["metadata"] = _pod_metadata(template["metadata"], deployment, parts["ConfigMap"])
    deployment["spec"]["progressDeadlineSeconds"] += loading_seconds(bundle)
    _fill_pod(template["spec"], config, bundle, image, access, parts["ConfigMap"])
    parts["Service"]["spec"]["selector"] = selector
    network.use_tls(parts, config.deploy, access)
    _fill_autoscaler(parts["HorizontalPodAutoscaler"]["spec"], config)


def _fill_autoscaler(spec: Object, config: Config) -> None:
    spec["scaleTargetRef"]["name"] = config.name
    spec["minReplicas"], spec["maxReplicas"] = config.deploy.min_replicas, config.deploy.max_replicas
    for metric in spec["metrics"]:
        if metric["type"] == "Pods":
            metric["pods"]["target"]["averageValue"] = str(config.deploy.target_concurrency)


def _fill_inference_service(
    parts: dict[str, Object], config: Config, bundle: Bundle, image: str, access: Access
) -> None:
    service = parts["InferenceService"]
    predictor = service["spec"]["predictor"]
    predictor.update(_pod_metadata(predictor, service, parts["ConfigMap"]))
    predictor["minReplicas"], predictor["maxReplicas"] = config.deploy.min_replicas, config.deploy.max_replicas
    _fill_pod(predictor, config, bundle, image, access, parts["ConfigMap"])


def _pod_metadata(template_metadata: Object, owner: Object, settings: Object) -> Object:
    """Give pods their owner's labels, and the annotations whose change must roll the pods out again."""
    metadata = owner["metadata"]
    annotations = {
        BUNDLE_ANNOTATION: metadata["annotations"][BUNDLE_ANNOTATION],
        OPTIONS_ANNOTATION: settings["metadata"]["name"],
    }
    return {"labels": {**template_metadata["labels"], **metadata["labels"]}, "annotations": annotations}


def _fill_pod(pod: Object, config: Config, bundle: Bundle, image: str, access: Access, settings: Object) -> None:
    deploy = config.deploy
    sizes = count_workers(config), count_threads(config, bundle)
    memory = deploy.memory or default_memory(bundle, *sizes, samples=config.serve.sample > 0)
    pod["serviceAccountName"] = config.name
    for constraint in pod.get("topologySpreadConstraints", []):
        constraint["labelSelector"]["matchLabels"] = identity_labels(config.name, "serving")
    container = pod["containers"][0]
    container["image"] = image
    _allow_for_loading(container, loading_seconds(bundle))
    pause = container["lifecycle"]["preStop"]["sleep"]
    pod["terminationGracePeriodSeconds"] += deploy.pre_stop_seconds - pause["seconds"]
    pause["seconds"] = deploy.pre_stop_seconds
    container["resources"] = {"requests": {"cpu": deploy.cpu, "memory": memory}, "limits": {"memory": memory}}
    training.set_node_placement(pod, container, deploy.gpus, deploy, deploy.image_pull_secret)
    refer_to_config_map(container, settings["metadata"]["name"], config)
    network.mount_access(pod, config, access, settings["metadata"]["name"])


_MEMORY_STEP = 64 << 20
_MIN_MEMORY = 512 << 20
_SERVICE_MEMORY = 256 << 20  # the service itself takes 96 MiB; the rest is for batches and requests
_WORKER_MEMORY = 128 << 20  # of each further process, most of it for batches and requests
_SAMPLES_MEMORY = 160 << 20  # of each process that keeps samples: those that wait, and the libraries that write them
_INLINE_COPIES = 2  # ONNX Runtime holds weights in model.onnx twice while it reads the file
_FILE_COPIES = 1.25  # of the other files; it reads external weights once
_PREFILL_TOKENS = 512  # positions whose logits a run of a language model returns
_FLOAT_BYTES = 4
_SCORE_COPIES = 7  # arrays of attention scores that a graph without fused attention keeps


def default_memory(bundle: Bundle, workers: int = 1, threads: int = 1, *, samples: bool = False) -> str:
    """Return the memory of a pod that loads and serves this bundle, where `deploy.memory` is not set.

    Workers share the weights unless each has to load them, as `serve.workers.share_models` decides.
    """
    files = bundle.manifest.files
    inline = files[bundle.model.name].bytes
    other_files = sum(entry.bytes for entry in files.values()) - inline
    size = _SERVICE_MEMORY + _INLINE_COPIES * inline + _FILE_COPIES * other_files
    if (generation := bundle.signature.generation) is not None:
        size += _generation_memory(bundle.signature, generation)
    if generation is not None or threads > 1:
        size *= workers
    else:
        size += (workers - 1) * _WORKER_MEMORY
    size += workers * _SAMPLES_MEMORY if samples else 0
    steps = math.ceil(max(size, _MIN_MEMORY) / _MEMORY_STEP)
    return f"{steps * _MEMORY_STEP >> 20}Mi"


def _generation_memory(signature: Signature, generation: Generation) -> int:
    """Return the bytes for a language model's cache, and for the logits and attention scores of its largest run."""
    vocabulary = next(spec.shape[-1] for spec in signature.outputs if spec.name == generation.logits)
    logits = _PREFILL_TOKENS * vocabulary * _FLOAT_BYTES if isinstance(vocabulary, int) else 0
    caches = [signature.input_specs[cache.input] for cache in generation.caches]
    position = sum(math.prod(size for size in spec.shape if isinstance(size, int)) * _FLOAT_BYTES for spec in caches)
    longest, rows = generation.positions_limit, signature.runtime.batch_rows
    cached = min(signature.limits.max_cache_bytes // position, longest * rows)
    per_position = generation.attention_heads * SCORE_BYTES
    step = cached * per_position  # one token more of each text
    prompt = min(_PREFILL_TOKENS * min(cached, longest) * per_position, MAX_SCORES_BYTES)
    scores = _SCORE_COPIES * max(step, prompt)
    return signature.limits.max_cache_bytes + logits + scores


def loading_seconds(bundle: Bundle) -> int:
    """Return the time to verify and load a large bundle, beyond the ten minutes of every model: a minute per GiB."""
    return 60 * (sum(entry.bytes for entry in bundle.manifest.files.values()) >> 30)


def _allow_for_loading(container: Object, seconds: int) -> None:
    """Give the probe that waits for the start so much longer."""
    probe: Object = container["startupProbe"]
    probe["failureThreshold"] += math.ceil(seconds / probe["periodSeconds"])


def _check_settings(config: Config) -> None:
    deploy = config.deploy
    if deploy.max_replicas < deploy.min_replicas:
        raise ConfigError(
            f"deploy.max_replicas is {deploy.max_replicas}, below deploy.min_replicas ({deploy.min_replicas}); raise it"
        )
    if deploy.storage_uri and not deploy.by_kserve:
        raise ConfigError("deploy.storage_uri: only KServe fetches bundles; set deploy.target=kserve")
    if deploy.storage_uri.startswith(_OCI):
        check_pinned(deploy.storage_uri.removeprefix(_OCI), "deploy.storage_uri")
    if config.serve.shadow:  # a pod has only the bundle of its image
        raise ConfigError("serve.shadow: is for the local service; leave it out: on a cluster a mesh mirrors requests")
    network.check_settings(deploy)
    check_host(config)
    check_canary(config)


def use_storage(parts: dict[str, Object], runtime: Object, deploy: Deploy, run: str) -> None:
    """Move the predictor's container into the runtime, whose command serves the bundle from its URI.

    `{run}` in the URI, as for a bundle on the volume of the runs, is replaced by the run's name.
    """
    predictor, spec = parts["InferenceService"]["spec"]["predictor"], runtime["spec"]
    (container,) = predictor.pop("containers")
    spec["containers"] = [{**spec["containers"][0], **container}]
    predictor["model"] = {
        "modelFormat": dict(spec["supportedModelFormats"][0]),
        "runtime": runtime["metadata"]["name"],
        "storageUri": deploy.storage_uri.replace("{run}", run),
    }
    parts["ServingRuntime"] = runtime


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
    """Refuse a canary on KServe: its `spec.canary` stands beside the live predictor, which only the cluster knows."""
    if config.deploy.by_kserve and (config.rollout.canary_percent or config.rollout.controller != "pipe"):
        setting = "canary_percent" if config.rollout.canary_percent else "controller"
        raise ConfigError(
            f"rollout.{setting}: with KServe no request can choose the version, so golden requests cannot check a "
            "canary; set deploy.target=kubernetes, or leave it out and add KServe's own spec.canary by deploy.overlay"
        )
    if config.rollout.controller != "pipe" and config.rollout.min_labels:
        raise ConfigError(
            "rollout.min_labels: only `pipe deploy` reads labels; set it to 0, or rollout.controller=pipe"
        )
