"""The objects that train on a cluster: an Indexed Job whose pods are nodes, and meet through a headless Service.

The same pods stand in a JobSet or a TrainJob where `cluster.workload` asks for one.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from k8s import placement
from k8s.manifest import Object, check_image, describe, identity, load
from k8s.names import JOB, JOBSET, LABEL, fitting
from k8s.trainjob import as_jobset, as_trainjob
from pipeline.spec.cluster import Cluster
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Train

RENDEZVOUS_PORT = 29400
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def objects(config: Config, image: str, run_dir: str) -> list[dict[str, Any]]:
    """In the order they are applied. `run_dir` is the run directory in the pods, on the shared volume, seen from /."""
    check_image(image)
    run_dir = _absolute(run_dir)
    job = job_name(config, run_dir)
    parts = _filled(config, image, run_dir, job)
    workload = parts.pop("Job")
    if config.cluster.queue:
        workload["metadata"]["labels"][QUEUE_LABEL] = config.cluster.queue
    claims = [] if config.cluster.claim else [parts["PersistentVolumeClaim"]]
    if config.cluster.workload == "job":
        return [*claims, parts["Service"], workload]
    if config.cluster.workload == "jobset":
        return [*claims, as_jobset(workload)]
    return [*claims, *as_trainjob(workload)]


def job_name(config: Config, run_dir: str) -> str:
    """A Job's pods are immutable, so each run has its own; with a pod's number it still fits a host name."""
    limit = JOB if config.cluster.workload == "job" else JOBSET
    return fitting(f"{config.name}-train-{digest_bytes(run_dir.encode())[:8]}", limit)


def claim_name(config: Config) -> str:
    return config.cluster.claim or fitting(f"{config.name}-runs", LABEL)


def node_args(config: Config, job: str, run_dir: str) -> list[str]:
    """What follows `python -m pipeline.node`, the same in every pod: its number says which one leads."""
    train = config.train
    where = f"{_first_pod(config.cluster, job)}:{RENDEZVOUS_PORT}"
    return [run_dir, f"--processes={_processes(train)}", f"--nodes={train.nodes}", f"--rendezvous={where}"]


def fill_claim(item: Object, cluster: Cluster) -> None:
    spec = item["spec"]
    spec["accessModes"] = [cluster.claim_access]
    spec["resources"]["requests"]["storage"] = cluster.claim_size
    if cluster.claim_class:
        spec["storageClassName"] = cluster.claim_class


def _first_pod(cluster: Cluster, job: str) -> str:
    """Its host name: an Indexed Job's under our own Service, a JobSet's under the one it makes."""
    return f"{job}-0.{job}" if cluster.workload == "job" else f"{job}-node-0-0.{job}"


def _filled(config: Config, image: str, run_dir: str, job: str) -> dict[str, Object]:
    gpus = _gpus(config.train)
    parts = load("train", placement.layers(gpus, config.cluster))
    labels = identity(config.name, "training")
    described = {"PersistentVolumeClaim": (claim_name(config), labels)}
    for kind, item in parts.items():
        name, own = described.get(kind, (job, {**labels, "app.kubernetes.io/instance": job}))
        describe(item, name, config.deploy.namespace, own, {})
    fill_claim(parts["PersistentVolumeClaim"], config.cluster)
    parts["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] = job
    _fill_job(parts["Job"], config, job)
    pod = parts["Job"]["spec"]["template"]["spec"]
    waiter, trainer = pod["initContainers"][0], pod["containers"][0]
    waiter["image"] = trainer["image"] = image
    waiter["args"] = [_first_pod(config.cluster, job)]
    trainer["args"] = node_args(config, job, run_dir)
    _fill_pod(pod, config, str(PurePosixPath(run_dir).parent))  # the volume holds all runs
    placement.place(pod, trainer, gpus, config.cluster)
    return parts


def _fill_job(job: Object, config: Config, name: str) -> None:
    spec, cluster = job["spec"], config.cluster
    spec["completions"] = spec["parallelism"] = config.train.most_nodes
    spec["activeDeadlineSeconds"] = cluster.deadline_seconds
    spec["ttlSecondsAfterFinished"] = cluster.keep_seconds
    template = spec["template"]
    template["metadata"]["labels"] = dict(job["metadata"]["labels"])
    template["spec"]["subdomain"] = name


def _fill_pod(pod: Object, config: Config, mount: str) -> None:
    cluster, trainer = config.cluster, pod["containers"][0]
    requests = {"cpu": cluster.cpu or str(_processes(config.train)), "memory": cluster.memory}
    trainer["resources"]["requests"] = requests
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    volumes["runs"]["persistentVolumeClaim"]["claimName"] = claim_name(config)
    volumes["shared-memory"]["emptyDir"]["sizeLimit"] = cluster.shared_memory
    place = next(place for place in trainer["volumeMounts"] if place["name"] == "runs")
    place["mountPath"] = mount
    if cluster.secret:
        trainer["envFrom"] = [{"secretRef": {"name": cluster.secret}}]


def _processes(train: Train) -> int:
    """A pod cannot count GPUs before it has them: one with `device: cuda`, two processes on CPU, unless told."""
    return train.processes or (1 if train.device == "cuda" else 2)


def _gpus(train: Train) -> int:
    return _processes(train) if train.device == "cuda" else 0


def _absolute(run_dir: str) -> str:
    path = PurePosixPath("/", run_dir)
    if len(path.parts) < 3 or ".." in path.parts:
        raise ConfigError(
            f"run directory {run_dir!r}: must be a path in the pod with a folder above it, as in /runs/NAME"
        )
    return str(path)
