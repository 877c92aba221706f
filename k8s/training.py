"""The objects that train on a cluster: an Indexed Job whose pods are nodes, and meet through a headless Service."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from k8s.manifest import Object, ask_for_gpus, check_image, describe, identity, load
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError
from pipeline.spec.sections import Train

RENDEZVOUS_PORT = 29400


def objects(config: Config, image: str, run_dir: str) -> list[dict[str, Any]]:
    """In the order they are applied. `run_dir` is the run directory in the pods, on the shared volume, seen from /."""
    check_image(image)
    run_dir = _absolute(run_dir)
    mount = str(PurePosixPath(run_dir).parent)  # the volume holds all runs
    job = job_name(config, run_dir)
    claim = f"{config.name}-runs"
    parts = load("train")
    labels = identity(config.name, "training")
    described = {"PersistentVolumeClaim": (claim, labels)}
    for kind, item in parts.items():
        name, own = described.get(kind, (job, {**labels, "app.kubernetes.io/instance": job}))
        describe(item, name, config.deploy.namespace, own, {})
    parts["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] = job
    _fill_job(parts["Job"], config.train, job, image)
    _fill_pod(parts["Job"]["spec"]["template"]["spec"], mount, claim)
    trainer = parts["Job"]["spec"]["template"]["spec"]["containers"][0]
    trainer["args"] = node_args(config.train, job, run_dir)
    return [parts[kind] for kind in ("PersistentVolumeClaim", "Service", "Job")]


def job_name(config: Config, run_dir: str) -> str:
    """A Job's pods are immutable, so each run has its own; with a pod's number it still fits a host name."""
    return f"{config.name}-train-{digest_bytes(run_dir.encode())[:8]}"


def node_args(train: Train, job: str, run_dir: str) -> list[str]:
    """What follows `python -m pipeline.node`, the same in every pod: its number says which one leads."""
    where = f"{job}-0.{job}:{RENDEZVOUS_PORT}"
    return [run_dir, f"--processes={_processes(train)}", f"--nodes={train.nodes}", f"--rendezvous={where}"]


def _fill_job(job: Object, train: Train, name: str, image: str) -> None:
    spec = job["spec"]
    spec["completions"] = spec["parallelism"] = train.most_nodes
    spec["backoffLimit"] = 6 * train.most_nodes  # lost pods; lost processes are started again within theirs
    template = spec["template"]
    template["metadata"]["labels"] = dict(job["metadata"]["labels"])
    pod = template["spec"]
    pod["subdomain"] = name
    waiter, trainer = pod["initContainers"][0], pod["containers"][0]
    waiter["image"] = trainer["image"] = image
    waiter["args"] = [f"{name}-0.{name}"]
    trainer["resources"]["requests"]["cpu"] = str(_processes(train))
    ask_for_gpus(pod, trainer, _processes(train) if train.device == "cuda" else 0)


def _fill_pod(pod: Object, mount: str, claim: str) -> None:
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "runs")
    volume["persistentVolumeClaim"]["claimName"] = claim
    place = next(place for place in pod["containers"][0]["volumeMounts"] if place["name"] == "runs")
    place["mountPath"] = mount


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
