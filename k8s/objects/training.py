"""The objects that train on a cluster: an Indexed Job whose pods are nodes, and meet through a headless Service.

The same pods stand in a JobSet or a TrainJob where `cluster.workload` asks for one.

Training that no `pipe` leads: its first pod makes the run, walks what comes before, and keeps the books.

The Indexed Job of training as other controllers want it: in a JobSet, or as Kubeflow Trainer's TrainJob.

Which nodes take a pod: GPUs, spot capacity, and the node labels and taints that the configuration names.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from k8s.objects.kustomize import Object
from k8s.objects.manifests import GPU, JOB, JOBSET, LABEL, check_image, describe, fitting, identity, load
from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_bytes
from pipeline.contract.settings.cluster import Cluster, Placed
from pipeline.contract.settings.stages import Train

RENDEZVOUS_PORT = 29400
TRAINER = "trainer"  # the container in the manifests
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def objects(config: Config, image: str, run_dir: str, name: str = "", *, alone: bool = False) -> list[dict[str, Any]]:
    """In the order they are applied. `run_dir` is the run directory in the pods, on the shared volume, seen from /.

    Training `alone` makes the run itself; else somebody has made it, and keeps its records.
    """
    made = parts(config, image, run_dir, name)
    if alone:
        trainer = made["Job"]["spec"]["template"]["spec"]["containers"][0]
        meeting = _meeting(config.cluster, made["Job"]["metadata"]["name"])
        lead_itself(trainer, config, _absolute(run_dir), _processes(config.train), meeting)
    if config.cluster.queue:
        made["Job"]["metadata"]["labels"][QUEUE_LABEL] = config.cluster.queue
    return [*claims(config), *as_asked(made, config)]


def parts(config: Config, image: str, run_dir: str, name: str = "") -> dict[str, Object]:
    """The Indexed Job and its Service, before another controller's object is made of them."""
    check_image(image)
    run_dir = _absolute(run_dir)
    return _filled(config, image, run_dir, name or job_name(config, run_dir))


def as_asked(made: dict[str, Object], config: Config) -> list[dict[str, Any]]:
    """What `cluster.workload` wants of them; the last one says how training stands."""
    if config.cluster.workload == "job":
        return [made["Service"], made["Job"]]
    return [as_jobset(made["Job"])] if config.cluster.workload == "jobset" else as_trainjob(made["Job"])


def container_name(config: Config) -> str:
    """Of the container that trains: Kubeflow Trainer has a name for it."""
    return NODE if config.cluster.workload == "trainjob" else TRAINER


def claims(config: Config) -> list[dict[str, Any]]:
    """The volume of the runs, where it is ours to make."""
    if config.cluster.claim:
        return []
    item = load("train")["PersistentVolumeClaim"]
    describe(item, claim_name(config), config.deploy.namespace, identity(config.name, "training"), {})
    _fill_claim(item, config.cluster)
    return [item]


def job_name(config: Config, run_dir: str) -> str:
    """A Job's pods are immutable, so each run has its own; with a pod's number it still fits a host name."""
    limit = JOB if config.cluster.workload == "job" else JOBSET
    return fitting(f"{config.name}-train-{digest_bytes(run_dir.encode())[:8]}", limit)


def claim_name(config: Config) -> str:
    return config.cluster.claim or fitting(f"{config.name}-runs", LABEL)


def node_args(config: Config, job: str, run_dir: str) -> list[str]:
    """What follows `python -m pipeline.training.node`, the same in every pod: its number says which one leads."""
    train = config.train
    where = f"--rendezvous={_meeting(config.cluster, job)}"
    return [run_dir, f"--processes={_processes(train)}", f"--nodes={train.nodes}", where]


def _meeting(cluster: Cluster, job: str) -> str:
    return f"{_first_pod(cluster, job)}:{RENDEZVOUS_PORT}"


def _first_pod(cluster: Cluster, job: str) -> str:
    """Its host name: an Indexed Job's under our own Service, a JobSet's under the one it makes."""
    return f"{job}-0.{job}" if cluster.workload == "job" else f"{job}-node-0-0.{job}"


def pod(config: Config, image: str, mount: str, gpus: int) -> Object:
    """The pod of training before it is placed on nodes; a single step takes it as it is."""
    made: Object = load("train", layers(gpus, config.cluster))["Job"]["spec"]["template"]["spec"]
    for container in (*made["initContainers"], *made["containers"]):
        container["image"] = image
    _fill_pod(made, config, mount)
    return made


def gpus_of(train: Train) -> int:
    return _processes(train) if train.device == "cuda" else 0


def _filled(config: Config, image: str, run_dir: str, job: str) -> dict[str, Object]:
    found = load("train")
    del found["PersistentVolumeClaim"]  # made once, not for each run
    labels = {**identity(config.name, "training"), "app.kubernetes.io/instance": job}
    for item in found.values():
        describe(item, job, config.deploy.namespace, labels, {})
    found["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] = job
    made = pod(config, image, str(PurePosixPath(run_dir).parent), gpus_of(config.train))  # the volume holds all runs
    trainer = made["containers"][0]
    made["initContainers"][0]["args"] = [_first_pod(config.cluster, job)]
    trainer["command"], trainer["args"] = ["python", "-m", "pipeline.training.node"], node_args(config, job, run_dir)
    place(made, trainer, gpus_of(config.train), config.cluster)
    found["Job"]["spec"]["template"]["spec"] = made
    _fill_job(found["Job"], config, job)
    return found


def _fill_claim(item: Object, cluster: Cluster) -> None:
    spec = item["spec"]
    spec["accessModes"] = [cluster.claim_access]
    spec["resources"]["requests"]["storage"] = cluster.claim_size
    if cluster.claim_class:
        spec["storageClassName"] = cluster.claim_class


def _fill_job(job: Object, config: Config, name: str) -> None:
    spec, cluster = job["spec"], config.cluster
    spec["completions"] = spec["parallelism"] = config.train.most_nodes
    spec["activeDeadlineSeconds"] = cluster.deadline_seconds
    spec["ttlSecondsAfterFinished"] = cluster.keep_seconds
    template = spec["template"]
    template["metadata"]["labels"] = dict(job["metadata"]["labels"])
    template["spec"]["subdomain"] = name


def _fill_pod(made: Object, config: Config, mount: str) -> None:
    cluster, trainer = config.cluster, made["containers"][0]
    requests = {"cpu": cluster.cpu or str(_processes(config.train)), "memory": cluster.memory}
    trainer["resources"]["requests"] = requests
    volumes = {volume["name"]: volume for volume in made["volumes"]}
    volumes["runs"]["persistentVolumeClaim"]["claimName"] = claim_name(config)
    volumes["shared-memory"]["emptyDir"]["sizeLimit"] = cluster.shared_memory
    place = next(place for place in trainer["volumeMounts"] if place["name"] == "runs")
    place["mountPath"] = mount
    if cluster.secret:
        trainer["envFrom"] = [{"secretRef": {"name": cluster.secret}}]


def _processes(train: Train) -> int:
    """A pod cannot count GPUs before it has them: one with `device: cuda`, two processes on CPU, unless told."""
    return train.processes or (1 if train.device == "cuda" else 2)


def _absolute(run_dir: str) -> str:
    path = PurePosixPath("/", run_dir)
    if len(path.parts) < 3 or ".." in path.parts:
        raise ConfigError(
            f"run directory {run_dir!r}: must be a path in the pod with a folder above it, as in /runs/NAME"
        )
    return str(path)


CONFIG = "PIPE_CONFIG"  # of what the run is made


def config_text(config: Config) -> str:
    """The configuration with all overrides, the same text every time."""
    values: Mapping[str, Any] = config.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def run_name(config: Config, image: str) -> str:
    """Another one for whatever would train something else: the pods of a Job cannot be changed."""
    return f"train-{digest_bytes(f'{image} {config_text(config)}'.encode())[:12]}"


def lead_itself(trainer: Object, config: Config, run_dir: str, processes: int, meeting: str) -> None:
    """The trainer's container as it stands in the manifest; where its pods meet is told by the run itself."""
    words = [f"train.processes={processes}", f"train.rendezvous={meeting}", "jobs.executor=local"]
    trainer["command"] = ["python", "-m", "pipeline.pod"]
    trainer["args"] = ["train", run_dir, "--begin", "--", "python", "-m", "pipeline.training.node", run_dir]
    trainer["env"].append({"name": CONFIG, "value": config_text(override_config(config, words))})


NODE = "node"  # of JobSet's jobs, and the container that Kubeflow Trainer looks for
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_RESTARTS = 3  # of all pods together; a lost pod alone is replaced by its Job
_TRAINER = "trainer.kubeflow.org"


def as_jobset(job: Object) -> Object:
    """JobSet makes the headless service itself; what ends one Job for an error ends the set."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": copy.deepcopy(job["metadata"]),
        "spec": _set(job, {}),
    }


def as_trainjob(job: Object) -> list[Object]:
    """The runtime that says how training runs here, and the TrainJob that asks for one run of it."""
    metadata = copy.deepcopy(job["metadata"])
    inner = _with_container_named_node(job)
    deadline = inner["spec"].pop("activeDeadlineSeconds")
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": _without_queue(metadata["labels"])},
        "spec": {
            "mlPolicy": {"numNodes": inner["spec"]["parallelism"]},
            "template": {"spec": _set(inner, {"metadata": {"labels": dict(_ANCESTOR)}})},
        },
    }
    (container,) = inner["spec"]["template"]["spec"]["containers"]
    trainer = {
        **{word: container[word] for word in ("image", "command", "args")},
        "numNodes": inner["spec"]["parallelism"],
        "resourcesPerNode": container["resources"],
    }
    asked = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": copy.deepcopy(metadata),
        "spec": {
            "activeDeadlineSeconds": deadline,
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": metadata["name"]},
            "trainer": copy.deepcopy(trainer),
        },
    }
    return [runtime, asked]


def _set(job: Object, more: dict[str, Any]) -> Object:
    spec = copy.deepcopy(job["spec"])
    keep = spec.pop("ttlSecondsAfterFinished")
    del spec["template"]["spec"]["subdomain"]  # the set gives its pods one
    # Pods made anew would meet the same error, and get the whole deadline once more.
    error = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    return {
        "ttlSecondsAfterFinished": keep,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _RESTARTS, "rules": [error]},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {**more, "spec": spec}}],
    }


def _with_container_named_node(job: Object) -> Object:
    inner = copy.deepcopy(job)
    (container,) = inner["spec"]["template"]["spec"]["containers"]
    for rule in inner["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = NODE
    container["name"] = NODE
    return inner


def _without_queue(labels: dict[str, str]) -> dict[str, str]:
    """It is the TrainJob that waits in the queue."""
    return {name: value for name, value in labels.items() if not name.startswith("kueue.")}


_TOLERATION = re.compile(r"^(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?$")


def layers(gpus: int, placed: Placed) -> list[str]:
    """The components of a folder that the configuration asks for, in the order they are laid on."""
    return ["gpu" if gpus else "cpu", *(["spot"] if placed.spot else [])]


def place(pod: Object, container: Object, gpus: int, placed: Placed) -> None:
    """Fill in what the components left open; what stays empty is not written."""
    if gpus:
        container["resources"].setdefault("limits", {})[GPU] = str(gpus)
    pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **placed.node_selector}
    pod["tolerations"] = [*pod.get("tolerations", []), *(toleration(text) for text in placed.tolerations)]
    if placed.pull_secret:
        pod["imagePullSecrets"] = [{"name": placed.pull_secret}]
    for word in ("nodeSelector", "tolerations"):
        if not pod[word]:
            del pod[word]


def toleration(text: str) -> dict[str, Any]:
    """As `kubectl taint` writes one: `key=value:Effect`, where value and effect may be missing."""
    found = _TOLERATION.match(text)
    assert found is not None, text  # the configuration is checked
    compared = {"operator": "Exists"} if found["value"] is None else {"operator": "Equal", "value": found["value"]}
    return {"key": found["key"], **compared, **({"effect": found["effect"]} if found["effect"] else {})}
