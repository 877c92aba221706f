"""The road as Kubeflow Pipelines reads it: the pipeline, and beside it what its pods need on Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from k8s import training, workflow
from k8s.manifest import GPU, Object
from k8s.workflow import MOUNT, Task
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError

RUN = f"{MOUNT}/{{{{$.inputs.parameters['run']}}}}"
_JOB = "{{$.pipeline_job_uuid}}"  # each submission is a run of its own
_SCHEMA = "2.1.0"
_TRIES = 6
_GIGA = {
    "m": 1e-12, "": 1e-9, "k": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3,
    "Ki": 1024e-9, "Mi": 1024**2 * 1e-9, "Gi": 1024**3 * 1e-9, "Ti": 1024**4 * 1e-9,
}  # fmt: skip


def documents(config: Config, tasks: Sequence[Task], image: str) -> list[Object]:
    """The pipeline and its platform, which stand in one file."""
    _check(config)
    pods = {task.step: workflow.step_pod(task, config, image) for task in tasks}
    pipeline: Object = {
        "components": {f"comp-{task.step}": _component(task) for task in tasks},
        "deploymentSpec": {
            "executors": {f"exec-{task.step}": {"container": _container(task, config, image)} for task in tasks}
        },
        "pipelineInfo": {"name": f"{config.name}-road"},
        "root": {"dag": {"tasks": {task.step: _task(task) for task in tasks}}},
        "schemaVersion": _SCHEMA,
        "sdkVersion": "pipe",
    }
    executors = {f"exec-{task.step}": _platform(pods[task.step], config) for task in tasks}
    executors["exec-train"]["activeDeadlineSeconds"] = config.cluster.deadline_seconds
    if config.cluster.queue:
        executors["exec-train"]["podMetadata"] = {"labels": {training.QUEUE_LABEL: config.cluster.queue}}
    return [pipeline, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}}]


def _check(config: Config) -> None:
    if config.train.most_nodes > 1:
        raise ConfigError(
            f"train.nodes={config.train.nodes}: a step of Kubeflow Pipelines is one pod; set train.nodes=1, "
            "or render the workflow with --engine argo"
        )
    if config.cluster.secret:
        raise ConfigError(
            "cluster.secret: Kubeflow Pipelines hands a Secret over key by key; give the pods' service account the "
            "right to the store instead, or render the workflow with --engine argo"
        )


def _component(task: Task) -> Object:
    return {
        "executorLabel": f"exec-{task.step}",
        "inputDefinitions": {"parameters": {"run": {"parameterType": "STRING"}}},
    }


def _task(task: Task) -> Object:
    return {
        "cachingOptions": {},  # what may be reused is decided by the step's own key
        "componentRef": {"name": f"comp-{task.step}"},
        **({"dependentTasks": list(task.after)} if task.after else {}),
        "inputs": {"parameters": {"run": {"runtimeValue": {"constant": _JOB}}}},
        "retryPolicy": {"maxRetryCount": _TRIES if task.step == "train" else 0},
        "taskInfo": {"name": task.step},
    }


def _container(task: Task, config: Config, image: str) -> Object:
    made = workflow.container(task, config, image, RUN)
    return {
        "command": made["command"],
        "env": made["env"],
        "image": image,
        "resources": _resources(made["resources"]),
    }


def _resources(resources: Object) -> Object:
    """Numbers for older back ends, Kubernetes' own words for today's."""
    cpu, memory = resources["requests"]["cpu"], resources["requests"]["memory"]
    found: dict[str, Any] = {
        "cpuRequest": float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu),
        "memoryRequest": _gigabytes(memory),
        "resourceCpuRequest": cpu,
        "resourceMemoryRequest": memory,
    }
    if count := resources.get("limits", {}).get(GPU):
        found["accelerator"] = {"count": count, "resourceCount": count, "resourceType": GPU, "type": GPU}
    return found


def _gigabytes(quantity: str) -> float:
    found = re.match(r"^([\d.]+)(\w*)$", quantity)
    assert found is not None, quantity  # the configuration is checked
    return float(found[1]) * _GIGA[found[2]]


def _platform(pod: Object, config: Config) -> Object:
    """Volumes and nodes; what affinity there is only prefers, and has a flatter form here."""
    claim = training.claim_name(config)
    size = config.cluster.shared_memory
    made: Object = {
        "emptyDirMounts": [
            {"medium": "Memory", "mountPath": "/dev/shm", "sizeLimit": size, "volumeName": "shared-memory"}  # noqa: S108
        ],
        "imagePullPolicy": "IfNotPresent",
        "pvcMount": [
            {
                "constant": claim,
                "mountPath": MOUNT,
                "pvcNameParameter": {"runtimeValue": {"constant": claim}},
            }
        ],
        "securityContext": {word: pod["securityContext"][word] for word in ("runAsUser", "runAsGroup", "runAsNonRoot")},
    }
    if "imagePullSecrets" in pod:
        names = [secret["name"] for secret in pod["imagePullSecrets"]]
        made["imagePullSecret"] = [
            {"secretName": name, "secretNameParameter": {"runtimeValue": {"constant": name}}} for name in names
        ]
    if "nodeSelector" in pod:
        made["nodeSelector"] = {"labels": pod["nodeSelector"]}
    if "tolerations" in pod:
        made["tolerations"] = pod["tolerations"]
    if "affinity" in pod:
        preferred = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        made["nodeAffinity"] = [{**term["preference"], "weight": term["weight"]} for term in preferred]
    return made
