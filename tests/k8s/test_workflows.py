"""Workflows are valid for the engines' own models: hera for Argo, protocol buffers for Kubeflow Pipelines."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml
from google.protobuf import json_format

from k8s import workflows
from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.training import CONFIG_VARIABLE
from pipeline.contract.config import Config, parse_config
from pipeline.contract.run import STEPS
from pipeline.executors.cluster import workflow_tasks
from pipeline.plan import STEP_KINDS, step_command
from pipeline.system.errors import ConfigError

from .conftest import Configure
from .invariants import pods
from .schemas import validate

IMAGE = "registry.example/train@sha256:" + "1" * 64
RICH: dict[str, Any] = {
    "train": {"device": "cuda", "processes": 4},
    "cluster": {
        "node_selector": {"pool": "a"}, "tolerations": ["pool=a:NoSchedule"], "volume_claim": "shared",
        "service_account": "pipe", "queue": "team",
    },
    "deploy": {"image_pull_secret": "registry"},
}  # fmt: skip
MANY: dict[str, Any] = {
    "train": {"nodes": "2:3", "processes": 2},
    "cluster": {"workload": "jobset", "service_account": "pipe"},
}
# Fields of an executor in kfp-kubernetes 2.17; the package itself requires another Kubernetes client than ours.
PLATFORM = {
    "activeDeadlineSeconds": None,
    "imagePullSecret": {"secretName", "secretNameParameter"},
    "emptyDirMounts": {"medium", "mountPath", "sizeLimit", "volumeName"},
    "nodeSelector": {"labels"},
    "podMetadata": {"labels"},
    "pvcMount": {"constant", "mountPath", "pvcNameParameter"},
    "securityContext": {"runAsUser", "runAsGroup", "runAsNonRoot"},
    "tolerations": {"key", "operator", "value", "effect"},
}


def with_image(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"image": IMAGE})})


def of_argo(config: Config) -> Object:
    config = with_image(config)
    return workflows.argo_workflow(config, workflow_tasks(config, workflows.ARGO_RUN))


def of_kfp(config: Config) -> tuple[Object, Object]:
    config = with_image(config)
    pipeline, platform = workflows.kfp_documents(config, workflow_tasks(config, workflows.KFP_RUN))
    return pipeline, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def templates(made: Object) -> dict[str, Object]:
    return {template["name"]: template for template in made["spec"]["templates"]}


@cache
def hera() -> Any:
    from hera.workflows import models

    return models.Workflow


def unknown_fields(given: Any, taken: Any, place: str = "") -> list[str]:
    """Return the fields that a model dropped because it does not know them."""
    if isinstance(given, dict):
        gone = [f"{place}/{name}" for name in given if name not in taken]
        return gone + [
            text
            for name in given
            if name in taken
            for text in unknown_fields(given[name], taken[name], f"{place}/{name}")
        ]
    if isinstance(given, list):
        return [text for one, other in zip(given, taken, strict=True) for text in unknown_fields(one, other, place)]
    return []


@pytest.mark.parametrize("settings", [{}, RICH, MANY], ids=["plain", "rich", "many"])
def test_argo_accepts_every_field(settings: dict[str, Any], configure: Configure) -> None:
    made = of_argo(configure(**settings))
    taken = hera().model_validate(made).model_dump(by_alias=True, exclude_none=True, mode="json")
    assert unknown_fields(made, taken) == []
    misspelt = {**made, "spec": {**made["spec"], "entrypint": "pipeline"}}
    taken = hera().model_validate(misspelt).model_dump(by_alias=True, exclude_none=True, mode="json")
    assert unknown_fields(misspelt, taken) == ["/spec/entrypint"]


@pytest.mark.parametrize("settings", [{}, RICH], ids=["plain", "rich"])
def test_kubeflow_pipelines_accepts_every_field(settings: dict[str, Any], configure: Configure) -> None:
    from kfp.pipeline_spec import pipeline_spec_pb2

    pipeline, executors = of_kfp(configure(**settings))
    read = json_format.ParseDict(pipeline, pipeline_spec_pb2.PipelineSpec())
    assert read.pipeline_info.name == "twice"
    json_format.ParseDict(
        {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}}, pipeline_spec_pb2.PlatformSpec()
    )
    assert set(executors) == set(pipeline["deploymentSpec"]["executors"])
    for executor in executors.values():
        for word, value in executor.items():
            for entry in value if isinstance(value, list) else [value]:
                assert PLATFORM[word] is None or set(entry) <= set(PLATFORM[word] or ())
    with pytest.raises(json_format.ParseError, match="componets"):
        json_format.ParseDict({**pipeline, "componets": {}}, pipeline_spec_pb2.PipelineSpec())


@pytest.mark.parametrize("step", STEPS)
def test_every_step_runs_its_planned_command(step: str, configure: Configure) -> None:
    config = with_image(configure(**RICH))
    pipeline, _ = of_kfp(config)
    for run, container in (
        (workflows.ARGO_RUN, templates(of_argo(config))[step]["container"]),
        (workflows.KFP_RUN, pipeline["deploymentSpec"]["executors"][f"exec-{step}"]["container"]),
    ):
        at = container["command"].index("--")
        assert tuple(container["command"][at + 1 :]) == step_command(step, config, run)
        assert container["image"] == IMAGE
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert parse_config(json.loads(env[CONFIG_VARIABLE]), "the workflow") == config
        assert env["PYTHONSAFEPATH"] == "1"


def test_a_step_depends_on_its_inputs(configure: Configure) -> None:
    config = configure()
    dag = {
        task["name"]: set(task.get("dependencies", ()))
        for task in templates(of_argo(config))["pipeline"]["dag"]["tasks"]
    }
    root = of_kfp(config)[0]["root"]["dag"]["tasks"]
    assert dag == {name: set(task.get("dependentTasks", ())) for name, task in root.items()}
    assert dag == {step: STEP_KINDS[step].upstream for step in STEPS}


def test_each_submission_is_its_own_run(configure: Configure) -> None:
    config = configure()
    assert "name" not in of_argo(config)["metadata"]
    assert "{{workflow.name}}" in workflows.ARGO_RUN
    for task in of_kfp(config)[0]["root"]["dag"]["tasks"].values():
        assert task["inputs"]["parameters"]["run"]["runtimeValue"] == {"constant": "{{$.pipeline_job_uuid}}"}


def test_gpus_go_to_the_steps_that_compute_on_them(configure: Configure) -> None:
    config = configure(**RICH)
    gpus = {
        name: template["container"]["resources"].get("limits", {}).get("nvidia.com/gpu")
        for name, template in templates(of_argo(config)).items()
        if "container" in template
    }
    assert {name for name, count in gpus.items() if count} == {"train", "evaluate"}
    assert gpus["train"] == "4"
    executors = of_kfp(config)[0]["deploymentSpec"]["executors"]
    assert {name for name, item in executors.items() if "accelerator" in item["container"]["resources"]} == {
        "exec-train", "exec-evaluate",
    }  # fmt: skip


def test_lost_pods_are_retried_and_errors_are_not(configure: Configure) -> None:
    strategy = templates(of_argo(configure()))["train"]["retryStrategy"]
    assert strategy["expression"] == "lastRetry.status == 'Error' or asInt(lastRetry.exitCode) > 3"
    assert strategy["retryPolicy"] == "Always"


@pytest.mark.parametrize(("settings", "steps"), [(RICH, {"deploy"}), (MANY, {"deploy", "train"})], ids=["one", "many"])
def test_only_steps_that_change_the_cluster_have_a_service_account(
    settings: dict[str, Any], steps: set[str], configure: Configure
) -> None:
    accounts = {
        name: item.get("serviceAccountName") for name, item in templates(of_argo(configure(**settings))).items()
    }
    assert {name: account for name, account in accounts.items() if account} == dict.fromkeys(steps, "pipe")


def test_argo_pods_have_time_for_a_checkpoint(configure: Configure) -> None:
    spec = of_argo(configure())["spec"]
    assert json.loads(spec["podSpecPatch"]) == {"terminationGracePeriodSeconds": 90}
    assert templates({"spec": spec})["train"]["retryStrategy"]["backoff"] == {"duration": "10s", "factor": "2"}


def test_both_engines_use_the_pull_secret(configure: Configure) -> None:
    config = configure(**RICH)
    assert of_argo(config)["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    for executor in of_kfp(config)[1].values():
        assert [secret["secretName"] for secret in executor["imagePullSecret"]] == ["registry"]


def test_training_is_queued_in_every_form(configure: Configure) -> None:
    label, config = {training.QUEUE_LABEL: "team"}, configure(**RICH)
    found = {name: template.get("metadata") for name, template in templates(of_argo(config)).items()}
    assert {name: metadata for name, metadata in found.items() if metadata} == {"train": {"labels": label}}
    executors = of_kfp(config)[1]
    assert [name for name, item in executors.items() if "podMetadata" in item] == ["exec-train"]
    assert executors["exec-train"]["podMetadata"] == {"labels": label}
    many = configure(**{**MANY, "cluster": {**MANY["cluster"], "queue": "team"}})
    (train,) = (item for item in of_argo(many)["spec"]["templates"] if "resource" in item)
    assert yaml.safe_load(train["resource"]["manifest"])["metadata"]["labels"][training.QUEUE_LABEL] == "team"


def test_training_ends_at_its_deadline_in_kubeflow_pipelines(configure: Configure) -> None:
    executors = of_kfp(configure(cluster={"active_deadline_seconds": 60}))[1]
    assert {name: item.get("activeDeadlineSeconds") for name, item in executors.items()} == {
        **dict.fromkeys(executors), "exec-train": 60,
    }  # fmt: skip


def test_argo_waits_for_training_on_several_pods(configure: Configure) -> None:
    template = templates(of_argo(configure(**MANY)))["train"]
    resource = template["resource"]
    made = yaml.safe_load(resource["manifest"])
    validate(made)
    assert resource["successCondition"] == "status.terminalState == Completed"
    assert resource["failureCondition"] == "status.terminalState == Failed"
    (pod,) = pods([made])
    (container,) = pod["containers"]
    assert container["command"][-4:] == ["python", "-m", "pipeline.training.node", workflows.ARGO_RUN]
    assert "args" not in container
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    meeting = json.loads(str(env[CONFIG_VARIABLE]))["train"]["rendezvous"]
    name = made["metadata"]["name"]
    assert meeting == f"{name}-node-0-0.{name}:29400"
    assert pod["initContainers"][0]["args"] == [meeting.partition(":")[0]]


def test_all_pods_of_a_workflow_use_the_same_run(configure: Configure) -> None:
    """Pod 0 creates the run from its configuration; the other pods must have the same."""
    made = of_argo(configure(**MANY))
    assert len(set(_configs(made))) == 1


def _configs(made: Object) -> list[str]:
    found = []
    for template in templates(made).values():
        container = template.get("container")
        if "resource" in template:
            (pod,) = pods([yaml.safe_load(template["resource"]["manifest"])])
            (container,) = pod["containers"]
        if container:
            found += [entry["value"] for entry in container["env"] if entry["name"] == CONFIG_VARIABLE]
    assert len(found) == len(STEPS)
    return found


def test_names_of_a_workflows_jobset_are_short_enough(configure: Configure) -> None:
    config = configure(**MANY).model_copy(update={"name": "a" * 40})
    prefix = of_argo(config)["metadata"]["generateName"]
    assert len(f"{prefix}abcde-train-node-0-9999-abcde") <= 63


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (of_argo, {"train": {"nodes": 2}}, "set cluster.workload=jobset"),
        (of_kfp, {"train": {"nodes": 2}}, "--workflow argo"),
        (of_kfp, {"cluster": {"env_secret": "store"}}, "key by key"),
    ],
)
def test_unsupported_settings_of_an_engine_are_refused(
    engine: Any, settings: dict[str, Any], message: str, configure: Configure
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(configure(**settings))
