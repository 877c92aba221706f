"""The Indexed Job of training as other controllers want it: in a JobSet, or as Kubeflow Trainer's TrainJob."""

from __future__ import annotations

import copy
from typing import Any

from k8s.manifest import Object

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
