"""The whole road as steps of a workflow: the pod of each, from the same files that training alone is made of.

The road as an Argo Workflow: a DAG of pods, and of a JobSet where training takes several.

The road as Kubeflow Pipelines reads it: the pipeline, and beside it what its pods need on Kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import GPU, check_image, fitting, identity
from k8s.objects.training import CONFIG as CONFIG
from k8s.objects.training import config_text as config_text
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError

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
    training.place(pod, pod["containers"][0], gpus, config.cluster)
    return pod


ARGO_RUN = f"{MOUNT}/{{{{workflow.name}}}}"  # each submission is a run of its own
_SET = "{{workflow.name}}-train"
_TRIES = 6  # of a pod that was lost; an error would be met again
_AGAIN = "lastRetry.status == 'Error' or asInt(lastRetry.exitCode) > 3"  # 1 to 3 are errors of ours, and the gate's
_PAUSE = {"duration": "10s", "factor": "2"}  # before the first new try, and how it grows
_LOOKED_AT = "600s"  # so long a pod's log can be read by kubectl; the run keeps it for good
_NAME = 26  # what is left of a JobSet's name beside `-road-`, five letters and `-train`


def made(config: Config, tasks: Sequence[Task], image: str) -> Object:
    """To be created, not applied: its name is given when it is submitted."""
    config = _meeting(config)
    labels = {**identity(config.name, "workflow"), "app.kubernetes.io/managed-by": "pipe"}
    pod = step_pod(tasks[0], config, image)
    dag = [{"name": task.step, "template": task.step, **_after(task)} for task in tasks]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "generateName": f"{fitting(config.name, _NAME)}-road-",
            "namespace": config.deploy.namespace,
            "labels": labels,
        },
        "spec": {
            "entrypoint": "road",
            "podMetadata": {"labels": labels},
            "securityContext": pod["securityContext"],
            **({"imagePullSecrets": pod["imagePullSecrets"]} if "imagePullSecrets" in pod else {}),
            "podSpecPatch": _patch(pod),
            "podGC": {"strategy": "OnPodSuccess", "deleteDelayDuration": _LOOKED_AT},
            "ttlStrategy": {"secondsAfterCompletion": config.cluster.keep_seconds},
            "volumes": pod["volumes"],
            "templates": [
                {"name": "road", "dag": {"tasks": dag}},
                *(_template(task, config, image) for task in tasks),
            ],
        },
    }


def _meeting(config: Config) -> Config:
    """Pods that train together know from the run where they meet; its name is known when it is submitted."""
    if config.train.most_nodes == 1:
        return config
    where = {"rendezvous": f"{_SET}-node-0-0.{_SET}:{training.RENDEZVOUS_PORT}"}
    return config.model_copy(update={"train": config.train.model_copy(update=where)})


def _patch(pod: Object) -> str:
    """What of our pods Argo has no field for: time to make a checkpoint, before all."""
    words = ("terminationGracePeriodSeconds", "enableServiceLinks")
    return json.dumps({word: pod[word] for word in words}, separators=(",", ":"))


def _after(task: Task) -> dict[str, Any]:
    return {"dependencies": list(task.after)} if task.after else {}


def _template(task: Task, config: Config, image: str) -> Object:
    if task.step == "train" and config.train.most_nodes > 1:
        return _of_several_pods(task, config, image)
    pod = step_pod(task, config, image)
    placed: dict[str, Any] = {word: pod[word] for word in ("nodeSelector", "tolerations", "affinity") if word in pod}
    account = config.cluster.service_account if task.step == "deploy" else ""
    queued = {"metadata": {"labels": {training.QUEUE_LABEL: config.cluster.queue}}}
    return {
        "name": task.step,
        **(queued if config.cluster.queue and task.step == "train" else {}),
        **placed,
        **({"serviceAccountName": account} if account else {}),
        **({"activeDeadlineSeconds": config.cluster.deadline_seconds} if task.step == "train" else {}),
        "retryStrategy": {"limit": str(_TRIES), "retryPolicy": "Always", "expression": _AGAIN, "backoff": _PAUSE},
        "container": container(task, config, image, ARGO_RUN),
    }


def _of_several_pods(task: Task, config: Config, image: str) -> Object:
    """Argo waits for a JobSet; a Job tells its end by a list of conditions, which Argo's words cannot look into."""
    if config.cluster.workload != "jobset":
        raise ConfigError(
            f"train.nodes={config.train.nodes}: in an Argo Workflow, training on several pods is a JobSet; "
            "set cluster.workload=jobset (JobSet must be installed), or train.nodes=1"
        )
    (found,) = (item for item in training.objects(config, image, ARGO_RUN, _SET) if item["kind"] == "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    trainer = job["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer["command"] = command(task, ARGO_RUN)
    del trainer["args"]  # where the pods meet stands in the run's configuration
    trainer["env"].append({"name": CONFIG, "value": config_text(config)})
    account = config.cluster.service_account
    return {
        "name": task.step,
        **({"serviceAccountName": account} if account else {}),  # it makes the JobSet and looks at it
        "resource": {
            "action": "create",
            "setOwnerReference": True,
            "successCondition": "status.terminalState == Completed",
            "failureCondition": "status.terminalState == Failed",
            "manifest": yaml.safe_dump(found, sort_keys=False, width=120),
        },
    }


KFP_RUN = f"{MOUNT}/{{{{$.inputs.parameters['run']}}}}"
_JOB = "{{$.pipeline_job_uuid}}"  # each submission is a run of its own
_SCHEMA = "2.1.0"
_GIGA = {
    "m": 1e-12, "": 1e-9, "k": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3,
    "Ki": 1024e-9, "Mi": 1024**2 * 1e-9, "Gi": 1024**3 * 1e-9, "Ti": 1024**4 * 1e-9,
}  # fmt: skip


def documents(config: Config, tasks: Sequence[Task], image: str) -> list[Object]:
    """The pipeline and its platform, which stand in one file."""
    _check(config)
    pods = {task.step: step_pod(task, config, image) for task in tasks}
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
    made = container(task, config, image, KFP_RUN)
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
