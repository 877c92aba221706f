"""The road as an Argo Workflow: a DAG of pods, and of a JobSet where training takes several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from k8s import training, workflow
from k8s.manifest import Object, identity
from k8s.names import fitting
from k8s.workflow import MOUNT, Task
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError

RUN = f"{MOUNT}/{{{{workflow.name}}}}"  # each submission is a run of its own
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
    pod = workflow.step_pod(tasks[0], config, image)
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
    pod = workflow.step_pod(task, config, image)
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
        "container": workflow.container(task, config, image, RUN),
    }


def _of_several_pods(task: Task, config: Config, image: str) -> Object:
    """Argo waits for a JobSet; a Job tells its end by a list of conditions, which Argo's words cannot look into."""
    if config.cluster.workload != "jobset":
        raise ConfigError(
            f"train.nodes={config.train.nodes}: in an Argo Workflow, training on several pods is a JobSet; "
            "set cluster.workload=jobset (JobSet must be installed), or train.nodes=1"
        )
    (found,) = (item for item in training.objects(config, image, RUN, _SET) if item["kind"] == "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    trainer = job["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer["command"] = workflow.command(task, RUN)
    del trainer["args"]  # where the pods meet stands in the run's configuration
    trainer["env"].append({"name": workflow.CONFIG, "value": workflow.config_text(config)})
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
