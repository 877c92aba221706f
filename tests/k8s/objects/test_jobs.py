from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.rollout_status import JobResult, job_progress, job_result, unrecoverable_problems
from k8s.objects.jobs import PodUser, StepJob, monitor_job, step_job
from k8s.objects.serving import serving_objects
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config, override_config
from pipeline.contract.run import STEPS
from pipeline.system.errors import ConfigError

from ..admission import validation_causes
from ..conftest import Configure
from ..invariants import check
from ..schemas import validate

IMAGE = f"registry.test/twice@sha256:{'0' * 64}"
ARGV = ("python", "-m", "pipeline.evaluate", "runs/run-1")


MONITORED: dict[str, dict[str, Any]] = {
    "train": {"image": IMAGE},
    "serve": {"sample": 0.1, "sample_to": "s3://bucket/samples"},
    "cluster": {"volume_claim": "runs"},
}


def monitored(configure: Configure, every: str = "1h", **sections: Any) -> Config:
    return configure(**{**MONITORED, **sections}, monitor={"every": every})


def worked(configure: Configure, step: str, *words: str, argv: tuple[str, ...] = ARGV) -> StepJob:
    config = override_config(configure(train={"image": IMAGE}), words)
    return step_job(config, step, "run-1", "k" * 64, argv, {"TOKENIZERS_PARALLELISM": "false"})


def pod_of(found: StepJob) -> dict[str, Any]:
    spec: dict[str, Any] = found.job["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("step", STEPS)
def test_the_objects_of_every_step_are_valid(step: str, configure: Configure) -> None:
    for item in worked(configure, step).objects:
        validate(item)
        assert validation_causes(item) == []
        assert item["metadata"]["labels"]["pipe-road/step"] == step
    assert worked(configure, step).job["spec"]["template"]["metadata"]["labels"]["pipe-road/run"] == "run-1"


def test_a_job_is_named_after_run_and_key(configure: Configure) -> None:
    config = configure(train={"image": IMAGE})
    names = {
        step_job(config, "prepare", run, key, ARGV, {}).job["metadata"]["name"]
        for run in ("a", "b")
        for key in ("c", "d")
    }
    assert len(names) == 4
    assert all(name.startswith("twice-prepare-") and len(name) <= 63 for name in names)


def test_failed_step_is_not_retried_but_a_lost_pod_is_replaced(configure: Configure) -> None:
    spec = worked(configure, "evaluate").job["spec"]
    assert spec["backoffLimit"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


def test_only_the_deploy_step_gets_a_service_account_token(configure: Configure) -> None:
    deploy, evaluate = (pod_of(worked(configure, step)) for step in ("deploy", "evaluate"))
    assert (deploy["serviceAccountName"], deploy["automountServiceAccountToken"]) == ("pipe", True)
    assert evaluate["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in evaluate


def test_cluster_settings_are_the_pods_requests(configure: Configure) -> None:
    words = ("cluster.cpu='3'", "cluster.memory=5Gi", "train.device=cuda", "cluster.queue=q")
    found = worked(
        configure, "evaluate", *words, "cluster.active_deadline_seconds=60", "cluster.node_selector={pool: gpus}"
    )
    (container,) = pod_of(found)["containers"]
    assert container["resources"]["requests"] == {"cpu": "3", "memory": "5Gi"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert pod_of(found)["nodeSelector"] == {"pool": "gpus"}
    assert container["workingDir"] == "/project"
    assert "runs" in {place["name"] for place in container["volumeMounts"] if place["mountPath"] == "/project/runs"}
    assert found.job["spec"]["activeDeadlineSeconds"] == 60
    assert {"name": "TOKENIZERS_PARALLELISM", "value": "false"} in container["env"]
    assert "JOB_COMPLETION_INDEX" not in {item["name"] for item in container["env"]}
    export = pod_of(worked(configure, "export", *words))["containers"][0]
    assert "nvidia.com/gpu" not in export["resources"].get("limits", {})


def test_a_run_outside_the_project_is_mounted_at_its_path(configure: Configure) -> None:
    found = worked(configure, "export", argv=("python", "-m", "export", "/elsewhere/runs/run-1"))
    assert {"name": "runs", "mountPath": "/elsewhere/runs"} in pod_of(found)["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("step", ["train", "export"])
def test_pods_write_to_the_volume_as_the_owner_of_the_run(step: str, configure: Configure) -> None:
    config = configure(train={"image": IMAGE})
    pod = pod_of(step_job(config, step, "run-1", "k" * 64, ARGV, {}, PodUser(1234, 5678)))
    expected = {"runAsUser": 1234, "runAsGroup": 5678, "fsGroup": 5678, "runAsNonRoot": True}
    assert expected.items() <= pod["securityContext"].items()


def test_a_step_needs_an_image_by_digest(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"train\.image is empty"):
        step_job(configure(), "prepare", "run", "key", ARGV, {})
    with pytest.raises(ConfigError, match="latest"):
        worked(configure, "prepare", "train.image=twice:latest")


def job(**conditions: str) -> dict[str, Any]:
    found = [{"type": kind, "status": status, "reason": "R", "message": "m"} for kind, status in conditions.items()]
    return {"spec": {"completions": 2}, "status": {"conditions": found}}


def pod(name: str, phase: str, code: int = 0, reason: str = "Error") -> dict[str, Any]:
    ended = {"state": {"terminated": {"exitCode": code, "reason": reason}}} if phase in ("Failed", "Succeeded") else {}
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [ended] if ended else []}}


def test_the_result_is_that_of_the_pod_that_failed_first() -> None:
    assert job_result(job(), []) is None
    assert job_result(job(Complete="True"), []) == JobResult(0)
    found = job_result(job(Failed="True"), [pod("a", "Failed", 143), pod("b", "Failed", 3), pod("c", "Succeeded")])
    assert found is not None
    assert found.status == 3
    assert found.reason.startswith("the container ended with Error, exit code 3; ")
    assert job_result(job(Failed="True"), []) == JobResult(1, "R: m")


def test_pods_of_an_earlier_job_do_not_explain_a_failure() -> None:
    failed = {**job(Failed="True"), "kind": "Job", "metadata": {"uid": "2"}}
    earlier, own = pod("a", "Failed", 3), pod("b", "Failed", 4)
    earlier["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "1"}]
    own["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "2"}]
    found = job_result(failed, [earlier, own])
    assert found is not None
    assert found.status == 4
    assert job_result(failed, [earlier]) == JobResult(1, "R: m")


def test_failed_image_pull_is_a_problem_and_waiting_is_not() -> None:
    waiting: dict[str, Any] = {"metadata": {"name": "a"}, "status": {"phase": "Pending"}}
    waiting["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}]
    assert unrecoverable_problems([waiting]) == "a: ErrImagePull: no"
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}
    pending = {"metadata": {"name": "b"}, "status": {"phase": "Pending", "conditions": [unscheduled]}}
    assert unrecoverable_problems([pending]) == ""
    assert job_progress(job(), [pending, pod("c", "Running")], 2) == "1 of 2 pods run; b: Pending: 0/1 nodes"
    suspended = {"kind": "Job", "spec": {"suspend": True}}
    assert job_progress(suspended, [], 1, ["Kueue: no room"]) == "the Job waits in its queue; Kueue: no room"


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_a_cron_job_monitors_the_run_of_the_bundle(target: str, configure: Configure, bundle: Bundle) -> None:
    config = monitored(configure, deploy={"target": target}, cluster={"volume_claim": "runs", "env_secret": "store"})
    objects = serving_objects(config, bundle, IMAGE)
    check(objects)
    item = objects[-1]
    validate(item)
    assert validation_causes(item) == []
    assert (item["kind"], item["metadata"]["name"]) == ("CronJob", "twice-monitor")
    assert item["metadata"]["labels"]["app.kubernetes.io/component"] == "serving"
    spec = item["spec"]
    assert (spec["schedule"], spec["concurrencyPolicy"]) == ("0 */1 * * *", "Forbid")
    job = spec["jobTemplate"]["spec"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore", "an alarm is no reason to try again"
    labels = job["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "step", "its pods are none of the service"
    (container,) = job["template"]["spec"]["containers"]
    run = bundle.path.parents[1].name
    words = ["python", "-m", "pipeline", "monitor", "-o", "json", "--samples", "s3://bucket/samples", f"runs/{run}"]
    assert (container["image"], container["command"]) == (IMAGE, words)
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["runs"] == "/project/runs"
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert job["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "runs"


@pytest.mark.parametrize(
    ("every", "schedule"),
    [
        ("1min", "*/1 * * * *"),
        ("30m", "*/30 * * * *"),
        ("60min", "0 */1 * * *"),
        ("7200s", "0 */2 * * *"),
        ("12h", "0 */12 * * *"),
        ("1d", "0 0 * * *"),
        ("24h", "0 0 * * *"),
    ],
)
def test_interval_is_a_schedule_of_cron(every: str, schedule: str, configure: Configure, tmp_path: Path) -> None:
    assert monitor_job(monitored(configure, every), tmp_path)["spec"]["schedule"] == schedule


@pytest.mark.parametrize("every", ["7h", "90min", "45m", "30s", "2d", "5h"])
def test_interval_without_a_schedule_names_those_with_one(every: str, configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"monitor.every {every}: .* use 1, 2, .* 30 min, or 1, 2, .* 24 h"):
        monitor_job(monitored(configure, every), tmp_path)


def test_interval_that_is_none_is_reported(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.every hourly: write it as 30s, 10min, 1h or 1d"):
        monitor_job(monitored(configure, "hourly"), tmp_path)


@pytest.mark.parametrize(
    ("sections", "missing"),
    [
        ({"train": {}}, "train.image;"),
        ({"cluster": {}}, "cluster.volume_claim;"),
        ({"serve": {"sample": 0}}, "serve.sample;"),
        ({"serve": {"sample": 1, "sample_to": ""}}, "serve.sample_to;"),
        ({"train": {}, "cluster": {}, "serve": {}}, "train.image, cluster.volume_claim, serve.sample;"),
    ],
)
def test_missing_settings_of_the_cron_job_are_named(
    sections: dict[str, Any], missing: str, configure: Configure, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"monitor.every: its CronJob needs {missing}"):
        monitor_job(monitored(configure, **sections), tmp_path)


def test_steps_on_the_cluster_bring_the_volume_of_the_cron_job(configure: Configure, tmp_path: Path) -> None:
    item = monitor_job(monitored(configure, cluster={"executor": "kubernetes"}), tmp_path)
    volumes = item["spec"]["jobTemplate"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == "twice-runs"
