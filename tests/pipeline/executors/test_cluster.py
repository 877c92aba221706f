from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.cluster.rollout_status import JobResult
from k8s.objects.training import CONFIG_VARIABLE
from pipeline.executors.cluster import ClusterExecutor, missing_image, render_workflow
from pipeline.history import Project, example_folder
from pipeline.system.errors import ResourceError, StageError

IMAGE = "train.image=registry.example/train@sha256:" + "1" * 64
STORED = "deploy.storage_uri=pvc://digits-runs/{run}/export/bundle"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(example_folder("starter"), tmp_path / "runs")


def configured(project: Project, folder: Path, *words: str) -> dict[str, Any]:
    files = render_workflow(project, project.config([IMAGE, *words]), "argo", str(folder))
    made = yaml.safe_load(next(file for file in files if file.name == "workflow.yaml").read_text())
    container = next(item["container"] for item in made["spec"]["templates"] if "container" in item)
    config: dict[str, Any] = json.loads(
        next(entry["value"] for entry in container["env"] if entry["name"] == CONFIG_VARIABLE)
    )
    return config


def test_configuration_of_a_pod_has_local_steps_and_no_image_build(project: Project, tmp_path: Path) -> None:
    found = configured(project, tmp_path / "out", "cluster.executor=kubernetes")
    assert (found["deploy"]["target"], found["cluster"]["executor"]) == ("kubernetes", "local")
    assert found["package"]["builder"] == "none"
    assert configured(project, tmp_path / "own", "package.builder=podman")["package"]["builder"] == "podman"


def test_missing_deploy_image_is_reported_before_the_run(project: Project) -> None:
    assert "set deploy.image" in missing_image(project.config([IMAGE]))
    image = "deploy.image=registry.example/serve@sha256:" + "2" * 64
    assert missing_image(project.config([IMAGE, image, "deploy.target=kserve", STORED])) == ""
    assert missing_image(project.config([IMAGE, "package.builder=podman"])) == ""


@pytest.mark.parametrize(
    ("code", "log", "kind", "cause"),
    [
        (1, "[1] ModuleNotFoundError: No module named 'einops'\n", None, f"`einops` is not installed in {IMAGE[12:]}"),
        (
            1,
            "starting\n[0] error: cannot write to /project/runs/run-1\n",
            StageError,
            "cannot write to /project/runs/run-1",
        ),
        (2, "error: no space left\n", ResourceError, "no space left"),
        (1, "starting\n", None, "the container ended with Error"),
    ],
)
def test_failure_of_a_pod_is_explained_by_its_log(
    code: int, log: str, kind: type[StageError | ResourceError] | None, cause: str, tmp_path: Path
) -> None:
    executor = ClusterExecutor(tmp_path, print, lambda _question: True)
    error = executor._find_cause(JobResult(code, "the container ended with Error, exit code 1"), IMAGE[12:], log)
    assert cause in str(error)
    assert kind is None or (type(error), error.exit_code, str(error)) == (kind, code, cause)
