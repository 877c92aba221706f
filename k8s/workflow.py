"""The whole road as steps of a workflow: the pod of each, from the same files that training alone is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k8s import placement, training
from k8s.manifest import Object, check_image
from k8s.own_run import CONFIG as CONFIG
from k8s.own_run import config_text as config_text
from pipeline.spec.config import Config

MOUNT = "/runs"
_ON_GPUS = ("train", "evaluate")


@dataclass(frozen=True)
class Task:
    """One step: its command as the plan has it, and the steps it reads from."""

    step: str
    argv: tuple[str, ...]
    after: tuple[str, ...]


def command(task: Task, run: str) -> list[str]:
    """The step's own command after `--`; what stands before it keeps the run's records, as `pipe run` does."""
    return ["python", "-m", "pipeline.pod", task.step, run, "--", *task.argv]


def container(task: Task, config: Config, image: str, run: str) -> Object:
    """As the trainer of a Job, without what only several pods need."""
    pod = step_pod(task, config, image)
    (found,) = pod["containers"]
    made: dict[str, Any] = {
        "image": image,
        "imagePullPolicy": found["imagePullPolicy"],
        "command": command(task, run),
        "env": [*(item for item in found["env"] if "value" in item), {"name": CONFIG, "value": config_text(config)}],
        **({"envFrom": found["envFrom"]} if "envFrom" in found else {}),
        "resources": found["resources"],
        "securityContext": found["securityContext"],
        "volumeMounts": found["volumeMounts"],
    }
    return made


def step_pod(task: Task, config: Config, image: str) -> Object:
    """The pod of one step; GPUs for those that compute on them."""
    check_image(image)
    gpus = training.gpus_of(config.train) if task.step in _ON_GPUS else 0
    pod = training.pod(config, image, MOUNT, gpus)
    if task.step != "train":
        pod["containers"][0]["resources"]["requests"]["cpu"] = config.cluster.cpu or "1"
    placement.place(pod, pod["containers"][0], gpus, config.cluster)
    return pod
