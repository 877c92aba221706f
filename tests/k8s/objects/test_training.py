from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from k8s.objects import training
from k8s.objects.training import TTL_SECONDS_AFTER_FINISHED, parse_toleration, set_node_placement
from pipeline.contract.config import parse_config
from pipeline.contract.restarts import LAUNCHER_END_SECONDS
from pipeline.contract.settings.cluster import NodePlacement
from pipeline.system.errors import ConfigError, DataError, ResourceError, StageError
from pipeline.system.processes import TERMINATED
from pipeline.training.node import PASSING_EXIT_CODE

from ..conftest import Configure
from ..invariants import check, pods
from ..schemas import validate


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("pool", {"key": "pool", "operator": "Exists"}),
        ("pool:NoExecute", {"key": "pool", "operator": "Exists", "effect": "NoExecute"}),
        ("pool=a", {"key": "pool", "operator": "Equal", "value": "a"}),
        ("pool=:NoSchedule", {"key": "pool", "operator": "Equal", "value": "", "effect": "NoSchedule"}),
        (
            "example.com/pool=gpu-a:PreferNoSchedule",
            {"key": "example.com/pool", "operator": "Equal", "value": "gpu-a", "effect": "PreferNoSchedule"},
        ),
    ],
)
def test_tolerations_have_the_form_of_kubectl_taint(text: str, made: dict[str, str]) -> None:
    assert parse_toleration(text) == made


@pytest.mark.parametrize("text", ["", "a=b:Never", "=a", "a b", "a:NoSchedule:NoExecute"])
def test_an_invalid_toleration_is_refused(text: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.tolerations"):
        configure({"tolerations": [text]})


def test_node_settings_are_added_to_the_components() -> None:
    pod: dict[str, Any] = {"nodeSelector": {"a": "1"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    container: dict[str, Any] = {"resources": {}}
    set_node_placement(pod, container, 2, NodePlacement(node_selector={"b": "2"}, tolerations=("pool",)), "")
    assert pod["nodeSelector"] == {"a": "1", "b": "2"}
    assert [item["key"] for item in pod["tolerations"]] == ["spot", "pool"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_empty_node_settings_are_not_written() -> None:
    pod: dict[str, Any] = {"nodeSelector": {}, "tolerations": []}
    set_node_placement(pod, {"resources": {}}, 0, NodePlacement(), "")
    assert pod == {}


def test_a_pull_secret_reaches_all_pods() -> None:
    pod: dict[str, Any] = {}
    set_node_placement(pod, {"resources": {}}, 0, NodePlacement(), "registry")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    pod = {}
    set_node_placement(pod, {"resources": {}}, 0, NodePlacement(), "")
    assert pod == {}


TRAINS: tuple[dict[str, Any], ...] = (
    {},
    {"nodes": 1, "processes": 1},
    {"nodes": 4, "processes": 8, "device": "cuda"},
    {"nodes": 2},
    {"nodes": "2:4"},
)


def objects(config: Any) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in training.training_objects(config, "/runs/first")}


def trainer(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    container: dict[str, Any] = parts["Job"]["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("workload", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("train", TRAINS)
def test_every_object_is_valid(train: dict[str, Any], workload: str, configure: Configure) -> None:
    parts = objects(configure(train=train, cluster={"workload": workload, "queue": "team"}))
    for item in parts.values():
        validate(item)
    check(list(parts.values()))


@pytest.mark.parametrize(
    ("workload", "kinds"),
    [("job", {"Service", "Job"}), ("jobset", {"JobSet"}), ("trainjob", {"TrainingRuntime", "TrainJob"})],
)
def test_each_workload_names_the_queue_once(workload: str, kinds: set[str], configure: Configure) -> None:
    parts = objects(configure(cluster={"workload": workload, "queue": "team", "volume_claim": "shared"}))
    assert set(parts) == kinds
    queued = {kind for kind, item in parts.items() if training.QUEUE_LABEL in item["metadata"]["labels"]}
    assert queued == {{"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[workload]}


@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_nodes_of_a_jobset_meet_at_its_first_pod(workload: str, configure: Configure) -> None:
    parts = objects(configure(train={"nodes": 3}, cluster={"workload": workload}))
    if workload == "jobset":
        name, spec = parts["JobSet"]["metadata"]["name"], parts["JobSet"]["spec"]
    else:
        name, spec = parts["TrainJob"]["metadata"]["name"], parts["TrainingRuntime"]["spec"]["template"]["spec"]
        assert parts["TrainJob"]["spec"]["trainer"]["numNodes"] == 3
        assert parts["TrainJob"]["spec"]["runtimeRef"]["name"] == parts["TrainingRuntime"]["metadata"]["name"]
    (job,) = spec["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    host = f"{name}-{job['name']}-0-0.{name}"
    assert pod["initContainers"][0]["args"] == [host]
    assert f"--rendezvous={host}:{training.RENDEZVOUS_PORT}" in pod["containers"][0]["args"]
    assert len(f"{name}-node-0-9999-abcde") <= 63
    assert spec["network"]["enableDNSHostnames"] is True


def test_kubeflow_trainer_and_the_failure_policy_find_the_container(configure: Configure) -> None:
    runtime = objects(configure(cluster={"workload": "trainjob"}))["TrainingRuntime"]["spec"]["template"]["spec"]
    (job,) = runtime["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec = job["template"]["spec"]
    assert [item["name"] for item in spec["template"]["spec"]["containers"]] == ["node"]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == "node"


def test_cluster_settings_reach_the_pods(configure: Configure) -> None:
    cluster = {"cpu": "7", "memory": "9Gi", "env_secret": "store", "active_deadline_seconds": 60}
    parts = objects(configure(cluster=cluster))
    spec, pod = parts["Job"]["spec"], parts["Job"]["spec"]["template"]["spec"]
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (60, TTL_SECONDS_AFTER_FINISHED)
    assert trainer(parts)["resources"]["requests"] == {"cpu": "7", "memory": "9Gi"}
    assert trainer(parts)["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert {"medium": "Memory", "sizeLimit": "9Gi"} in [volume.get("emptyDir") for volume in pod["volumes"]]


def test_an_existing_claim_is_used(configure: Configure) -> None:
    parts = objects(configure(cluster={"volume_claim": "shared"}))
    assert "PersistentVolumeClaim" not in parts
    volumes = parts["Job"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "shared"}} in volumes


def test_a_terminated_pod_has_time_for_a_checkpoint(configure: Configure) -> None:
    """The grace period is longer than a node waits for its processes."""
    pod = objects(configure())["Job"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > LAUNCHER_END_SECONDS


@pytest.mark.parametrize(("nodes", "pods"), [(1, 1), (3, 3), ("2:4", 4)])
def test_job_has_a_pod_for_each_of_the_most_nodes(nodes: int | str, pods: int, configure: Configure) -> None:
    parts = objects(configure(train={"nodes": nodes, "rendezvous": "elsewhere:1"}))
    assert (parts["Job"]["spec"]["completions"], parts["Job"]["spec"]["parallelism"]) == (pods, pods)
    assert f"--nodes={nodes}" in trainer(parts)["args"]


def test_an_error_ends_the_job_and_a_lost_pod_is_replaced(configure: Configure) -> None:
    """Only the exit codes of our own errors end the Job."""
    ignored, fails = objects(configure())["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore"
    assert fails["action"] == "FailJob"
    ours = {StageError.exit_code, ConfigError.exit_code, DataError.exit_code, ResourceError.exit_code}
    assert set(fails["onExitCodes"]["values"]) == ours
    assert not ours & {PASSING_EXIT_CODE, TERMINATED, 128 + signal.SIGKILL}


def test_every_pod_runs_the_same_command_and_meets_at_pod_0(configure: Configure) -> None:
    parts = objects(configure(train={"nodes": 3, "processes": 4}))
    job, service = parts["Job"]["metadata"]["name"], parts["Service"]["metadata"]["name"]
    assert trainer(parts)["command"] + trainer(parts)["args"] == [
        "python",
        "-m",
        "pipeline.training.node",
        "/runs/first",
        "--processes=4",
        "--nodes=3",
        f"--rendezvous={job}-0.{service}:29400",
    ]


def test_an_init_container_waits_for_the_name_of_pod_0(configure: Configure) -> None:
    parts = objects(configure(train={"nodes": 3}))
    pod, service = parts["Job"]["spec"]["template"], parts["Service"]["spec"]
    host = f"{parts['Job']['metadata']['name']}-0.{parts['Service']['metadata']['name']}"
    assert pod["spec"]["initContainers"][0]["args"] == [host]
    assert pod["spec"]["subdomain"] == parts["Service"]["metadata"]["name"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    compile(pod["spec"]["initContainers"][0]["command"][2], "waiter", "exec")


def test_pods_share_the_claim_that_holds_the_run_directory(configure: Configure) -> None:
    parts = objects(configure())
    volumes = {volume["name"]: volume for volume in parts["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == parts["PersistentVolumeClaim"]["metadata"]["name"]
    assert {"name": "runs", "mountPath": "/runs"} in trainer(parts)["volumeMounts"]
    assert parts["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_environment_keeps_a_users_train_py_from_shadowing_ours(configure: Configure) -> None:
    env = {item["name"]: item.get("value") for item in trainer(objects(configure()))["env"]}
    assert env["PYTHONSAFEPATH"] == "1"
    assert "JOB_COMPLETION_INDEX" in env


def test_one_gpu_is_requested_per_process(configure: Configure) -> None:
    parts = objects(configure(train={"device": "cuda", "processes": 8}))
    assert trainer(parts)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "limits" not in trainer(objects(configure()))["resources"]


def test_each_run_has_its_own_job_with_valid_pod_names(configure: Configure) -> None:
    config = configure().model_copy(update={"name": "a" * 40})
    first, second = (training.job_name(config, run) for run in ("/runs/first", "/runs/second"))
    assert first != second
    assert len(f"{first}-9999") <= 63


def test_a_relative_run_directory_becomes_absolute(configure: Configure) -> None:
    parts = {item["kind"]: item for item in training.training_objects(configure(), "runs/train")}
    assert trainer(parts)["args"][0] == "/runs/train"


@pytest.mark.parametrize("run_dir", ["", "/", "/first", "/runs/../../etc"])
def test_a_run_directory_outside_the_volume_is_refused(run_dir: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match="run directory"):
        training.training_objects(configure(), run_dir)


@pytest.mark.parametrize("workload", ["job", "jobset", "trainjob"])
def test_standalone_training_puts_the_rendezvous_into_its_run(workload: str, configure: Configure) -> None:
    config = configure(train={"nodes": 3, "processes": 2}, cluster={"workload": workload})
    made = training.training_objects(config, "/runs/first", standalone=True)
    check(made)
    for item in made:
        validate(item)
    (container,) = next(pods(made))["containers"]
    command = ["python", "-m", "pipeline.pod", "train", "/runs/first", "--begin", "--"]
    assert container["command"] + container["args"] == [
        *command,
        "python",
        "-m",
        "pipeline.training.node",
        "/runs/first",
    ]
    trainer = next((item["spec"]["trainer"] for item in made if item["kind"] == "TrainJob"), container)
    assert (trainer["command"], trainer["args"]) == (container["command"], container["args"])
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    found = parse_config(json.loads(str(env[training.CONFIG_VARIABLE])), "the manifest")
    host = {"job": "{0}-0.{0}", "jobset": "{0}-node-0-0.{0}", "trainjob": "{0}-node-0-0.{0}"}[workload]
    assert found.train.rendezvous == f"{host.format(made[-1]['metadata']['name'])}:{training.RENDEZVOUS_PORT}"
    assert (found.train.nodes, found.train.processes, found.cluster.executor) == (3, 2, "local")


def test_run_names_depend_on_what_is_trained(configure: Configure) -> None:
    first = training.run_name(configure())
    assert first == training.run_name(configure())
    assert (
        len(
            {
                first,
                training.run_name(configure(train={"image": "trainer:2"})),
                training.run_name(configure({"cpu": "2"})),
            }
        )
        == 3
    )
