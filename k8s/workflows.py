"""The pipeline as a workflow of another engine: an Argo Workflow, or a pipeline of Kubeflow Pipelines.

Each step is a pod made from the manifests of training, and runs the command that it would run locally.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import GPU_RESOURCE, count_cpus, fit_name, identity_labels
from k8s.objects.training import CONFIG_VARIABLE, config_text
from pipeline.contract.config import Config
from pipeline.contract.settings.section import count_bytes
from pipeline.system.errors import ConfigError

RUNS_FOLDER = "/runs"
ARGO_RUN = f"{RUNS_FOLDER}/{{{{workflow.name}}}}"  # each submission is a new run
KFP_RUN = f"{RUNS_FOLDER}/{{{{$.inputs.parameters['run']}}}}"

_GPU_STEPS = ("train", "evaluate")
_JOBSET_NAME = "{{workflow.name}}-train"
_KFP_JOB = "{{$.pipeline_job_uuid}}"  # the name of a submission's run
_KFP_SCHEMA_VERSION = "2.1.0"
_MAX_RETRIES = 6  # of pods that were lost
# Exit codes 1 to 3 are errors that a retry would meet again, and the gate's rejection.
_RETRY_EXPRESSION = "lastRetry.status == 'Error' or asInt(lastRetry.exitCode) > 3"
_RETRY_BACKOFF = {"duration": "10s", "factor": "2"}
_PATCHED_FIELDS = ("terminationGracePeriodSeconds", "enableServiceLinks")  # of pods; Argo has none of its own for them
_POD_DELETE_DELAY = "600s"  # kubectl can read the log that long; the run keeps it for good
_MAX_NAME = 26  # what `-pipe-`, five random characters and `-train` leave of a JobSet's name


@dataclass(frozen=True)
class WorkflowTask:
    """One step: its command, and the steps it depends on."""

    step: str
    argv: tuple[str, ...]
    after: tuple[str, ...]


def step_command(task: WorkflowTask, run: str) -> list[str]:
    """Return the pod's command: `pipeline.pod` keeps the run's records and runs the step's own command, after `--`."""
    return ["python", "-m", "pipeline.pod", task.step, run, "--", *task.argv]


def step_container(task: WorkflowTask, config: Config, run: str) -> Object:
    """Return the container of a step, made from the trainer's but without what only several pods need."""
    (trainer,) = step_pod(task, config)["containers"]
    env = [item for item in trainer["env"] if "value" in item]
    container: dict[str, Any] = {
        "image": config.train.image,
        "imagePullPolicy": trainer["imagePullPolicy"],
        "command": step_command(task, run),
        "env": [*env, {"name": CONFIG_VARIABLE, "value": config_text(config)}],
        **({"envFrom": trainer["envFrom"]} if "envFrom" in trainer else {}),
        "resources": trainer["resources"],
        "securityContext": trainer["securityContext"],
        "volumeMounts": trainer["volumeMounts"],
    }
    return container


def step_pod(task: WorkflowTask, config: Config) -> Object:
    """Return the pod spec of a step, with GPUs if the step computes on them."""
    gpus = training.gpus_per_pod(config.train) if task.step in _GPU_STEPS else 0
    pod = training.training_pod(config, RUNS_FOLDER, gpus)
    if task.step != "train":
        pod["containers"][0]["resources"]["requests"]["cpu"] = config.cluster.cpu or "1"
    training.set_node_placement(pod, pod["containers"][0], gpus, config.cluster, config.deploy.image_pull_secret)
    return pod


def argo_workflow(config: Config, tasks: Sequence[WorkflowTask]) -> Object:
    """Return an Argo Workflow: a DAG of pods, and of a JobSet if training takes several pods.

    It is to be created, not applied: it gets its name when it is submitted.
    """
    config = _with_rendezvous(config)
    labels = {**identity_labels(config.name, "workflow"), "app.kubernetes.io/managed-by": "pipe"}
    pod = step_pod(tasks[0], config)
    dag = [
        {"name": task.step, "template": task.step, **({"dependencies": list(task.after)} if task.after else {})}
        for task in tasks
    ]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "generateName": f"{fit_name(config.name, _MAX_NAME)}-pipe-",
            "namespace": config.deploy.namespace,
            "labels": labels,
        },
        "spec": {
            "entrypoint": "pipeline",
            "podMetadata": {"labels": labels},
            "securityContext": pod["securityContext"],
            **({"imagePullSecrets": pod["imagePullSecrets"]} if "imagePullSecrets" in pod else {}),
            "podSpecPatch": json.dumps({field: pod[field] for field in _PATCHED_FIELDS}, separators=(",", ":")),
            "podGC": {"strategy": "OnPodSuccess", "deleteDelayDuration": _POD_DELETE_DELAY},
            "ttlStrategy": {"secondsAfterCompletion": training.TTL_SECONDS_AFTER_FINISHED},
            "volumes": pod["volumes"],
            "templates": [
                {"name": "pipeline", "dag": {"tasks": dag}},
                *(_argo_template(task, config) for task in tasks),
            ],
        },
    }


def _with_rendezvous(config: Config) -> Config:
    """Set the rendezvous of training on several pods; Argo fills in the workflow's name when it is submitted."""
    if config.train.most_nodes == 1:
        return config
    rendezvous = {"rendezvous": f"{_JOBSET_NAME}-node-0-0.{_JOBSET_NAME}:{training.RENDEZVOUS_PORT}"}
    return config.model_copy(update={"train": config.train.model_copy(update=rendezvous)})


def _argo_template(task: WorkflowTask, config: Config) -> Object:
    if task.step == "train" and config.train.most_nodes > 1:
        return _jobset_template(task, config)
    pod = step_pod(task, config)
    nodes: dict[str, Any] = {field: pod[field] for field in ("nodeSelector", "tolerations") if field in pod}
    account = config.cluster.service_account if task.step == "deploy" else ""
    queued = {"metadata": {"labels": {training.QUEUE_LABEL: config.cluster.queue}}}
    return {
        "name": task.step,
        **(queued if config.cluster.queue and task.step == "train" else {}),
        **nodes,
        **({"serviceAccountName": account} if account else {}),
        **({"activeDeadlineSeconds": config.cluster.active_deadline_seconds} if task.step == "train" else {}),
        "retryStrategy": {
            "limit": str(_MAX_RETRIES),
            "retryPolicy": "Always",
            "expression": _RETRY_EXPRESSION,
            "backoff": _RETRY_BACKOFF,
        },
        "container": step_container(task, config, ARGO_RUN),
    }


def _jobset_template(task: WorkflowTask, config: Config) -> Object:
    """Return a template that creates a JobSet; a Job would not do, as Argo's conditions cannot search its status."""
    if config.cluster.workload != "jobset":
        raise ConfigError(
            f"train.nodes={config.train.nodes}: in an Argo Workflow, training on several pods is a JobSet; "
            "set cluster.workload=jobset (JobSet must be installed), or train.nodes=1"
        )
    (jobset,) = (item for item in training.training_objects(config, ARGO_RUN, _JOBSET_NAME) if item["kind"] == "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    trainer = job["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer["command"] = step_command(task, ARGO_RUN)
    del trainer["args"]  # the rendezvous is in the run's configuration
    trainer["env"].append({"name": CONFIG_VARIABLE, "value": config_text(config)})
    account = config.cluster.service_account
    return {
        "name": task.step,
        **({"serviceAccountName": account} if account else {}),  # it creates the JobSet and reads its status
        "resource": {
            "action": "create",
            "setOwnerReference": True,
            "successCondition": "status.terminalState == Completed",
            "failureCondition": "status.terminalState == Failed",
            "manifest": yaml.safe_dump(jobset, sort_keys=False, width=120),
        },
    }


def kfp_documents(config: Config, tasks: Sequence[WorkflowTask]) -> list[Object]:
    """Return the two documents of a Kubeflow Pipelines file: the pipeline, and its Kubernetes platform."""
    _check_kfp(config)
    pods = {task.step: step_pod(task, config) for task in tasks}
    pipeline: Object = {
        "components": {f"comp-{task.step}": _kfp_component(task) for task in tasks},
        "deploymentSpec": {
            "executors": {f"exec-{task.step}": {"container": _kfp_container(task, config)} for task in tasks}
        },
        "pipelineInfo": {"name": config.name},
        "root": {"dag": {"tasks": {task.step: _kfp_task(task) for task in tasks}}},
        "schemaVersion": _KFP_SCHEMA_VERSION,
        "sdkVersion": "pipe",
    }
    executors = {f"exec-{task.step}": _kfp_platform(pods[task.step], config) for task in tasks}
    executors["exec-train"]["activeDeadlineSeconds"] = config.cluster.active_deadline_seconds
    if config.cluster.queue:
        executors["exec-train"]["podMetadata"] = {"labels": {training.QUEUE_LABEL: config.cluster.queue}}
    return [pipeline, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}}]


def _check_kfp(config: Config) -> None:
    if config.train.most_nodes > 1:
        raise ConfigError(
            f"train.nodes={config.train.nodes}: a step of Kubeflow Pipelines is one pod; set train.nodes=1, "
            "or render an Argo workflow (`--workflow argo`)"
        )
    if config.cluster.env_secret:
        raise ConfigError(
            "cluster.env_secret: Kubeflow Pipelines passes a Secret key by key; give the pods' service account access "
            "to the object store instead, or render an Argo workflow (`--workflow argo`)"
        )


def _kfp_component(task: WorkflowTask) -> Object:
    return {
        "executorLabel": f"exec-{task.step}",
        "inputDefinitions": {"parameters": {"run": {"parameterType": "STRING"}}},
    }


def _kfp_task(task: WorkflowTask) -> Object:
    return {
        "cachingOptions": {},  # the step's own key decides what is reused
        "componentRef": {"name": f"comp-{task.step}"},
        **({"dependentTasks": list(task.after)} if task.after else {}),
        "inputs": {"parameters": {"run": {"runtimeValue": {"constant": _KFP_JOB}}}},
        "retryPolicy": {"maxRetryCount": _MAX_RETRIES if task.step == "train" else 0},
        "taskInfo": {"name": task.step},
    }


def _kfp_container(task: WorkflowTask, config: Config) -> Object:
    container = step_container(task, config, KFP_RUN)
    return {
        "command": container["command"],
        "env": container["env"],
        "image": config.train.image,
        "resources": _kfp_resources(container["resources"]),
    }


def _kfp_resources(resources: Object) -> Object:
    """Return resources as numbers for older back ends, and as Kubernetes quantities for current ones."""
    cpu, memory = resources["requests"]["cpu"], resources["requests"]["memory"]
    values: dict[str, Any] = {
        "cpuRequest": count_cpus(cpu),
        "memoryRequest": count_bytes(memory) / 1e9,
        "resourceCpuRequest": cpu,
        "resourceMemoryRequest": memory,
    }
    if count := resources.get("limits", {}).get(GPU_RESOURCE):
        values["accelerator"] = {
            "count": count,
            "resourceCount": count,
            "resourceType": GPU_RESOURCE,
            "type": GPU_RESOURCE,
        }
    return values


def _kfp_platform(pod: Object, config: Config) -> Object:
    """Return volumes and node placement."""
    claim = training.claim_name(config)
    size = config.cluster.memory
    platform: Object = {
        "emptyDirMounts": [
            {"medium": "Memory", "mountPath": "/dev/shm", "sizeLimit": size, "volumeName": "shared-memory"}  # noqa: S108
        ],
        "imagePullPolicy": "IfNotPresent",
        "pvcMount": [
            {"constant": claim, "mountPath": RUNS_FOLDER, "pvcNameParameter": {"runtimeValue": {"constant": claim}}}
        ],
        "securityContext": {
            field: pod["securityContext"][field] for field in ("runAsUser", "runAsGroup", "runAsNonRoot")
        },
    }
    if "imagePullSecrets" in pod:
        names = [secret["name"] for secret in pod["imagePullSecrets"]]
        platform["imagePullSecret"] = [
            {"secretName": name, "secretNameParameter": {"runtimeValue": {"constant": name}}} for name in names
        ]
    if "nodeSelector" in pod:
        platform["nodeSelector"] = {"labels": pod["nodeSelector"]}
    if "tolerations" in pod:
        platform["tolerations"] = pod["tolerations"]
    return platform
