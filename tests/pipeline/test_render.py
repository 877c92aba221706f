from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.objects.training import CONFIG
from pipeline.history import Project, example
from pipeline.render import lacking, render_workflow

IMAGE = "train.image=registry.example/train@sha256:" + "1" * 64
STORED = "deploy.storage_uri=pvc://digits-runs/{run}/export/bundle"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(example("starter"), tmp_path / "runs")


def configured(project: Project, folder: Path, *words: str) -> dict[str, Any]:
    files = render_workflow(project, project.config([IMAGE, *words]), "argo", str(folder))
    made = yaml.safe_load(next(file for file in files if file.name == "workflow.yaml").read_text())
    container = next(item["container"] for item in made["spec"]["templates"] if "container" in item)
    config: dict[str, Any] = json.loads(next(entry["value"] for entry in container["env"] if entry["name"] == CONFIG))
    return config


def test_a_pod_makes_no_jobs_serves_nobody_and_builds_nothing(project: Project, tmp_path: Path) -> None:
    found = configured(project, tmp_path / "out", "jobs.executor=kubernetes")
    assert (found["deploy"]["target"], found["jobs"]["executor"]) == ("kubernetes", "local")
    assert found["package"]["build"] == "never"
    assert configured(project, tmp_path / "own", "package.build=require")["package"]["build"] == "require"


def test_what_the_last_step_lacks_is_said_before(project: Project) -> None:
    assert "set deploy.image" in lacking(project.config([IMAGE]))
    image = "deploy.image=registry.example/serve@sha256:" + "2" * 64
    assert lacking(project.config([IMAGE, image, "deploy.mode=inferenceservice", STORED])) == ""
    assert lacking(project.config([IMAGE, "package.build=require"])) == ""
