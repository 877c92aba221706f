"""The pipeline as a workflow of another engine: an Argo Workflow, or a pipeline of Kubeflow Pipelines.

Each step is a pod made from the manifests of training, and runs the command that it would run locally. What else an
engine offers, a patch of its file sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import GPU_RESOURCE, fit_name
from k8s.objects.training import CONFIG_VARIABLE, config_text
from pipeline.contract.config import Config
from pipeline.system.errors import ConfigError

RUNS_FOLDER = "/runs"
ARGO_RUN = f"{RUNS_FOLDER}/{{{{workflow.name}}}}"  # each submission is a new run
KFP_RUN = f"{RUNS_FOLDER}/{{{{$.inputs.parameters['run']}}}}"

_JOBSET_NAME = "{{workflow.name}}-train"
_MAX_RETRIES = 6  # of pods that were lost
# Exit codes 1 to 3 are errors that a retry would meet again, and the gate's rejection.
_ARGO_RETRY = {
    "limit": str(_MAX_RETRIES),
    "retryPolicy": "Always",
    "expression": "lastRetry.status == 'Error' or asInt(lastRetry.exitCode) > 3",
    "backoff": {"duration": "10s", "factor": "2"},
}
_MAX_NAME = 26  # what `-pipe-`, five random characters and `-train` leave of a JobSet's name


@dataclass(frozen=True)
class WorkflowTask:
    """One step: the command of its pod, and the steps it depends on."""

    step: str
    argv: tuple[str, ...]
    after: tuple[str, ...]


def step_pod(task: WorkflowTask, config: Config) -> tuple[Object, Object]:
    """Return the pod spec of a step and its container, which lacks what only the pods of several nodes need."""
    gpus = training.gpus_per_pod(config.train) if task.step in ("train", "evaluate") else 0
    pod = training.training_pod(config, RUNS_FOLDER, gpus)
    (container,) = pod["containers"]
    if task.step != "train":
        container["resources"]["requests"]["cpu"] = config.cluster.cpu or "1"
    training.set_node_placement(pod, container, gpus, config.cluster, config.deploy.image_pull_secret)
    env = [item for item in container["env"] if "value" in item]
    container |= {"command": list(task.argv), "env": [*env, _config_variable(config)]}
    for name in ("name", "args", "ports"):
        del container[name]
    return pod, container


def _config_variable(config: Config) -> Object:
    return {"name": CONFIG_VARIABLE, "value": config_text(config)}


def _choose(item: Object, *fields: str) -> Object:
    return {field: item[field] for field in fields if field in item}


def argo_workflow(config: Config, tasks: Sequence[WorkflowTask]) -> Object:
    """Return an Argo Workflow: a DAG of pods, and of a JobSet if training takes several pods.

    It is to be created, not applied: it gets its name when it is submitted.
    """
    if config.train.most_nodes > 1:  # Argo fills in the name
        rendezvous = {"rendezvous": f"{_JOBSET_NAME}-node-0-0.{_JOBSET_NAME}:{training.RENDEZVOUS_PORT}"}
        config = config.model_copy(update={"train": config.train.model_copy(update=rendezvous)})
    pod, _ = step_pod(tasks[0], config)
    dag = [{"name": task.step, "template": task.step, "dependencies": list(task.after)} for task in tasks]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": f"{fit_name(config.name, _MAX_NAME)}-pipe-", "namespace": config.deploy.namespace},
        "spec": {
            "entrypoint": "pipeline",
            **_choose(pod, "securityContext", "imagePullSecrets", "volumes"),
            "podSpecPatch": json.dumps(_choose(pod, "terminationGracePeriodSeconds")),  # Argo has no field for it
            "templates": [{"name": "pipeline", "dag": {"tasks": dag}}, *(_argo_step(task, config) for task in tasks)],
        },
    }


def _argo_step(task: WorkflowTask, config: Config) -> Object:
    is_training, account = task.step == "train", {"serviceAccountName": config.cluster.service_account}
    if is_training and config.train.most_nodes > 1:  # the account creates the JobSet and reads its status
        return {"name": task.step, **account, "resource": _argo_jobset(task, config)}
    pod, container = step_pod(task, config)
    template: Object = {"name": task.step, "retryStrategy": _ARGO_RETRY, "container": container}
    template |= _choose(pod, "nodeSelector", "tolerations")
    if task.step == "deploy":
        template |= account
    if is_training:
        template |= {"activeDeadlineSeconds": config.cluster.active_deadline_seconds, **_queue(config, "metadata")}
    return template


def _queue(config: Config, field: str) -> Object:
    return {field: {"labels": {training.QUEUE_LABEL: config.cluster.queue}}} if config.cluster.queue else {}


def _argo_jobset(task: WorkflowTask, config: Config) -> Object:
    """Return the creation of a JobSet; a Job would not do, as Argo's conditions cannot search its status."""
    if config.cluster.workload != "jobset":
        raise ConfigError(
            f"train.nodes={config.train.nodes}: in an Argo Workflow, training on several pods is a JobSet; "
            "set cluster.workload=jobset (JobSet must be installed), or train.nodes=1"
        )
    jobset = training.training_objects(config, ARGO_RUN, _JOBSET_NAME)[-1]
    (job,) = jobset["spec"]["replicatedJobs"]
    trainer = job["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer["command"] = list(task.argv)
    del trainer["args"]  # the rendezvous is in the run's configuration
    trainer["env"].append(_config_variable(config))
    return {
        "action": "create",
        "setOwnerReference": True,
        "successCondition": "status.terminalState == Completed",
        "failureCondition": "status.terminalState == Failed",
        "manifest": yaml.safe_dump(jobset, sort_keys=False, width=120),
    }


def kfp_documents(config: Config, tasks: Sequence[WorkflowTask]) -> list[Object]:
    """Return the two documents of a Kubeflow Pipelines file: the pipeline, and its Kubernetes platform."""
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
    inputs = {"parameters": {"run": {"parameterType": "STRING"}}}
    pods = {f"exec-{task.step}": step_pod(task, config) for task in tasks}
    platform = {name: _kfp_platform(pod, config) for name, (pod, _) in pods.items()}
    deadline = {"activeDeadlineSeconds": config.cluster.active_deadline_seconds}
    platform["exec-train"] |= {**deadline, **_queue(config, "podMetadata")}
    pipeline: Object = {
        "components": {
            f"comp-{task.step}": {"executorLabel": f"exec-{task.step}", "inputDefinitions": inputs} for task in tasks
        },
        "deploymentSpec": {
            "executors": {name: {"container": _kfp_container(container)} for name, (_, container) in pods.items()}
        },
        "pipelineInfo": {"name": config.name},
        "root": {"dag": {"tasks": {task.step: _kfp_task(task) for task in tasks}}},
        "schemaVersion": "2.1.0",
        "sdkVersion": "pipe",
    }
    return [pipeline, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": platform}}}}]


def _kfp_task(task: WorkflowTask) -> Object:
    return {
        "cachingOptions": {},  # the step's own key decides what is reused
        "componentRef": {"name": f"comp-{task.step}"},
        "dependentTasks": list(task.after),
        "inputs": {"parameters": {"run": {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}}},
        "retryPolicy": {"maxRetryCount": _MAX_RETRIES if task.step == "train" else 0},
        "taskInfo": {"name": task.step},
    }


def _kfp_container(container: Object) -> Object:
    requests, limits = container["resources"]["requests"], container["resources"].get("limits", {})
    resources: dict[str, Any] = {"resourceCpuRequest": requests["cpu"], "resourceMemoryRequest": requests["memory"]}
    if count := limits.get(GPU_RESOURCE):
        resources["accelerator"] = {"resourceCount": count, "resourceType": GPU_RESOURCE}
    return {**_choose(container, "image", "command", "env"), "resources": resources}


def _kfp_platform(pod: Object, config: Config) -> Object:
    """Return volumes and node placement."""
    claim = training.claim_name(config)
    secrets = [secret["name"] for secret in pod.get("imagePullSecrets", ())]
    memory = {"medium": "Memory", "mountPath": "/dev/shm", "sizeLimit": config.cluster.memory}  # noqa: S108
    return {
        "emptyDirMounts": [{**memory, "volumeName": "shared-memory"}],
        "pvcMount": [{"constant": claim, "mountPath": RUNS_FOLDER, "pvcNameParameter": _kfp_constant(claim)}],
        "securityContext": _choose(pod["securityContext"], "runAsUser", "runAsGroup", "runAsNonRoot"),
        "imagePullSecret": [{"secretName": name, "secretNameParameter": _kfp_constant(name)} for name in secrets],
        "nodeSelector": {"labels": pod.get("nodeSelector", {})},
        **_choose(pod, "tolerations"),
    }


def _kfp_constant(value: str) -> Object:
    return {"runtimeValue": {"constant": value}}
