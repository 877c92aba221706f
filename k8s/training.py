"""The objects that train on a cluster: an Indexed Job whose pods are nodes, and meet through a headless Service.

The same pods stand in a JobSet or a TrainJob where `cluster.workload` asks for one.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from k8s import own_run, placement
from k8s.manifest import Object, check_image, describe, identity, load
from k8s.names import JOB, JOBSET, LABEL, fitting
from k8s.trainjob import NODE, as_jobset, as_trainjob
from pipeline.spec.cluster import Cluster
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Train

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
        own_run.lead_itself(trainer, config, _absolute(run_dir), _processes(config.train), meeting)
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
    """What follows `python -m pipeline.node`, the same in every pod: its number says which one leads."""
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
    made: Object = load("train", placement.layers(gpus, config.cluster))["Job"]["spec"]["template"]["spec"]
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
    trainer["command"], trainer["args"] = ["python", "-m", "pipeline.node"], node_args(config, job, run_dir)
    placement.place(made, trainer, gpus_of(config.train), config.cluster)
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
