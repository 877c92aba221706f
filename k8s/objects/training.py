"""Objects for training: an Indexed Job whose pods are the nodes, and a headless Service by which they find each other.

With `cluster.workload` the same Job is put into a JobSet or a Kubeflow TrainJob. Training that no `pipe` follows is
`standalone`: its first pod creates the run and runs the steps before training.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    GPU_RESOURCE,
    MAX_JOB_NAME,
    MAX_JOBSET_NAME,
    MAX_LABEL,
    check_pinned,
    fit_name,
    identity_labels,
    load_manifests,
    set_metadata,
)
from k8s.objects.overlay import overlay_job
from pipeline.contract.config import Config, override_config
from pipeline.contract.settings.cluster import Cluster, NodePlacement
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_bytes

RENDEZVOUS_PORT = 29400
TTL_SECONDS_AFTER_FINISHED = 604_800  # finished training can be inspected for a week
TRAINER_CONTAINER = "trainer"  # in our manifests
NODE_CONTAINER = "node"  # in a TrainJob, where Kubeflow Trainer looks for this name; also JobSet's replicated job
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CONFIG_VARIABLE = "PIPE_CONFIG"  # the configuration from which a pod creates its run

_TRAINER_GROUP = "trainer.kubeflow.org"
_ANCESTOR_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_JOBSET_RESTARTS = 3  # of all pods together; a single lost pod is replaced by its Job
_TOLERATION = re.compile(r"^(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?$")


def training_objects(
    config: Config, run_dir: str, name: str = "", *, standalone: bool = False, overlay: Path | None = None
) -> list[dict[str, Any]]:
    """Return all objects in the order they are applied.

    `run_dir` is the path of the run directory in the pods, on the shared volume. `standalone` training creates the
    run itself; otherwise it exists, and another process keeps its records.
    """
    parts = training_parts(config, run_dir, name)
    if standalone:
        trainer = parts["Job"]["spec"]["template"]["spec"]["containers"][0]
        rendezvous = _rendezvous(config.cluster, parts["Job"]["metadata"]["name"])
        make_standalone(trainer, config, _absolute_path(run_dir), _processes(config.train), rendezvous)
    if config.cluster.queue:
        parts["Job"]["metadata"]["labels"][QUEUE_LABEL] = config.cluster.queue
    parts["Job"] = overlay_job(parts["Job"], overlay)
    return [*volume_claims(config), *wrap_in_workload(parts, config)]


def check_training_image(config: Config) -> None:
    if not config.train.image:
        raise ConfigError("train.image is empty; name the image of the pods: `pipe package --train --push` makes it")
    check_pinned(config.train.image, "train.image")


def training_parts(config: Config, run_dir: str, name: str = "") -> dict[str, Object]:
    """Return the Indexed Job and its Service, before they are put into another controller's object."""
    run_dir = _absolute_path(run_dir)
    return _fill_parts(config, run_dir, name or job_name(config, run_dir))


def wrap_in_workload(parts: dict[str, Object], config: Config) -> list[dict[str, Any]]:
    """Return the objects for `cluster.workload`; the status of training is that of the last one."""
    if config.cluster.workload == "job":
        return [parts["Service"], parts["Job"]]
    return [as_jobset(parts["Job"])] if config.cluster.workload == "jobset" else as_trainjob(parts["Job"])


def container_name(config: Config) -> str:
    """Return the name of the container that trains."""
    return NODE_CONTAINER if config.cluster.workload == "trainjob" else TRAINER_CONTAINER


def volume_claims(config: Config) -> list[dict[str, Any]]:
    """Return the claim for the volume of the runs, unless an existing one is configured."""
    if config.cluster.volume_claim:
        return []
    item = load_manifests("train")["PersistentVolumeClaim"]
    set_metadata(item, claim_name(config), config.deploy.namespace, identity_labels(config.name, "training"), {})
    return [item]


def job_name(config: Config, run_dir: str) -> str:
    """Name a Job after its run: a Job's pods cannot be changed. With a pod's number the name still fits a host name."""
    limit = MAX_JOB_NAME if config.cluster.workload == "job" else MAX_JOBSET_NAME
    return fit_name(f"{config.name}-train-{digest_bytes(run_dir.encode())[:8]}", limit)


def claim_name(config: Config) -> str:
    return config.cluster.volume_claim or fit_name(f"{config.name}-runs", MAX_LABEL)


def node_args(config: Config, job: str, run_dir: str) -> list[str]:
    """Return the arguments of `python -m pipeline.training.node`, which are the same in every pod."""
    train = config.train
    rendezvous = f"--rendezvous={_rendezvous(config.cluster, job)}"
    return [run_dir, f"--processes={_processes(train)}", f"--nodes={train.nodes}", rendezvous]


def _rendezvous(cluster: Cluster, job: str) -> str:
    return f"{_first_pod(cluster, job)}:{RENDEZVOUS_PORT}"


def _first_pod(cluster: Cluster, job: str) -> str:
    """Return the host name of pod 0: a JobSet creates its own headless Service and names pods differently."""
    return f"{job}-0.{job}" if cluster.workload == "job" else f"{job}-node-0-0.{job}"


def training_pod(config: Config, mount: str, gpus: int) -> Object:
    """Return the pod spec of training, before node placement; the other steps' pods start from it too."""
    pod: Object = load_manifests("train", [node_component(gpus)])["Job"]["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        container["image"] = config.train.image
    _fill_pod(pod, config, mount)
    return pod


def gpus_per_pod(train: Train) -> int:
    return _processes(train) if train.device == "cuda" else 0


def _fill_parts(config: Config, run_dir: str, job: str) -> dict[str, Object]:
    parts = load_manifests("train")
    del parts["PersistentVolumeClaim"]  # created once, not for each run
    labels = {**identity_labels(config.name, "training"), "app.kubernetes.io/instance": job}
    for item in parts.values():
        set_metadata(item, job, config.deploy.namespace, labels, {})
    parts["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] = job
    runs_folder = str(PurePosixPath(run_dir).parent)  # the volume holds all runs
    pod = training_pod(config, runs_folder, gpus_per_pod(config.train))
    trainer = pod["containers"][0]
    pod["initContainers"][0]["args"] = [_first_pod(config.cluster, job)]
    trainer["command"], trainer["args"] = ["python", "-m", "pipeline.training.node"], node_args(config, job, run_dir)
    set_node_placement(pod, trainer, gpus_per_pod(config.train), config.cluster, config.deploy.image_pull_secret)
    parts["Job"]["spec"]["template"]["spec"] = pod
    _fill_job(parts["Job"], config, job)
    return parts


def _fill_job(job: Object, config: Config, name: str) -> None:
    spec, cluster = job["spec"], config.cluster
    spec["completions"] = spec["parallelism"] = config.train.most_nodes
    spec["activeDeadlineSeconds"] = cluster.active_deadline_seconds
    spec["ttlSecondsAfterFinished"] = TTL_SECONDS_AFTER_FINISHED
    template = spec["template"]
    template["metadata"]["labels"] = dict(job["metadata"]["labels"])
    template["spec"]["subdomain"] = name


def _fill_pod(pod: Object, config: Config, mount: str) -> None:
    cluster, trainer = config.cluster, pod["containers"][0]
    requests = {"cpu": cluster.cpu or str(_processes(config.train)), "memory": cluster.memory}
    trainer["resources"]["requests"] = requests
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    volumes["runs"]["persistentVolumeClaim"]["claimName"] = claim_name(config)
    volumes["shared-memory"]["emptyDir"]["sizeLimit"] = cluster.memory
    runs_mount = next(item for item in trainer["volumeMounts"] if item["name"] == "runs")
    runs_mount["mountPath"] = mount
    if cluster.env_secret:
        trainer["envFrom"] = [{"secretRef": {"name": cluster.env_secret}}]


def _processes(train: Train) -> int:
    """Return the processes in each pod, by default one with `device: cuda` (the GPUs are not known yet), else two."""
    return train.processes or (1 if train.device == "cuda" else 2)


def _absolute_path(run_dir: str) -> str:
    path = PurePosixPath("/", run_dir)
    if len(path.parts) < 3 or ".." in path.parts:
        raise ConfigError(
            f"run directory {run_dir!r}: must be a path in the pod with a folder above it, as in /runs/NAME"
        )
    return str(path)


def config_text(config: Config) -> str:
    """Return the configuration with all overrides, always as the same text."""
    values: Mapping[str, Any] = config.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def run_name(config: Config) -> str:
    """Name a run after image and configuration: a Job's pods cannot be changed, so other content needs another name."""
    return f"train-{digest_bytes(f'{config.train.image} {config_text(config)}'.encode())[:12]}"


def make_standalone(trainer: Object, config: Config, run_dir: str, processes: int, rendezvous: str) -> None:
    """Make the trainer create its run from the configuration, which also names the rendezvous."""
    overrides = [f"train.processes={processes}", f"train.rendezvous={rendezvous}", "cluster.executor=local"]
    trainer["command"] = ["python", "-m", "pipeline.pod"]
    trainer["args"] = ["train", run_dir, "--begin", "--", "python", "-m", "pipeline.training.node", run_dir]
    trainer["env"].append({"name": CONFIG_VARIABLE, "value": config_text(override_config(config, overrides))})


def as_jobset(job: Object) -> Object:
    """Put the Job into a JobSet, which creates the headless Service itself."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": copy.deepcopy(job["metadata"]),
        "spec": _jobset_spec(job, {}),
    }


def as_trainjob(job: Object) -> list[Object]:
    """Return a TrainingRuntime made from the Job, and the TrainJob that runs it once."""
    metadata = copy.deepcopy(job["metadata"])
    inner = _with_container_named_node(job)
    deadline = inner["spec"].pop("activeDeadlineSeconds")
    labels = {name: value for name, value in metadata["labels"].items() if name != QUEUE_LABEL}  # only of the TrainJob
    runtime = {
        "apiVersion": f"{_TRAINER_GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": labels},
        "spec": {
            "mlPolicy": {"numNodes": inner["spec"]["parallelism"]},
            "template": {"spec": _jobset_spec(inner, {"metadata": {"labels": dict(_ANCESTOR_LABEL)}})},
        },
    }
    (container,) = inner["spec"]["template"]["spec"]["containers"]
    trainer = {
        **{field: container[field] for field in ("image", "command", "args")},
        "numNodes": inner["spec"]["parallelism"],
        "resourcesPerNode": container["resources"],
    }
    trainjob = {
        "apiVersion": f"{_TRAINER_GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": copy.deepcopy(metadata),
        "spec": {
            "activeDeadlineSeconds": deadline,
            "runtimeRef": {"apiGroup": _TRAINER_GROUP, "kind": "TrainingRuntime", "name": metadata["name"]},
            "trainer": copy.deepcopy(trainer),
        },
    }
    return [runtime, trainjob]


def _jobset_spec(job: Object, template_fields: dict[str, Any]) -> Object:
    """Return the spec of a JobSet with one Job; a Job that failed by an error or its deadline fails the set.

    New pods would meet the same error, and get the whole deadline again.
    """
    spec = copy.deepcopy(job["spec"])
    ttl_seconds = spec.pop("ttlSecondsAfterFinished")
    del spec["template"]["spec"]["subdomain"]  # set by JobSet
    error = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    return {
        "ttlSecondsAfterFinished": ttl_seconds,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _JOBSET_RESTARTS, "rules": [error]},
        "replicatedJobs": [{"name": NODE_CONTAINER, "replicas": 1, "template": {**template_fields, "spec": spec}}],
    }


def _with_container_named_node(job: Object) -> Object:
    inner = copy.deepcopy(job)
    (container,) = inner["spec"]["template"]["spec"]["containers"]
    for rule in inner["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = NODE_CONTAINER
    container["name"] = NODE_CONTAINER
    return inner


def node_component(gpus: int) -> str:
    """Return the kustomize component for the nodes' kind."""
    return "gpu" if gpus else "cpu"


def set_node_placement(
    pod: Object, container: Object, gpus: int, placement: NodePlacement, image_pull_secret: str
) -> None:
    """Add GPUs, node selector, tolerations and the pull secret to what the components have set."""
    if gpus:
        container["resources"].setdefault("limits", {})[GPU_RESOURCE] = str(gpus)
    pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **placement.node_selector}
    pod["tolerations"] = [*pod.get("tolerations", []), *(parse_toleration(text) for text in placement.tolerations)]
    if image_pull_secret:
        pod["imagePullSecrets"] = [{"name": image_pull_secret}]
    for field in ("nodeSelector", "tolerations"):
        if not pod[field]:
            del pod[field]


def parse_toleration(text: str) -> dict[str, Any]:
    """Parse `key=value:Effect`, as `kubectl taint` writes it; value and effect are optional."""
    match = _TOLERATION.match(text)
    assert match is not None, text  # the configuration is validated
    operator = {"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]}
    return {"key": match["key"], **operator, **({"effect": match["effect"]} if match["effect"] else {})}
