from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.project import Project
from pipeline.spec.config import parse_config
from pipeline.spec.errors import StageError
from pipeline.training_image import package_training

from .packing import BASE, DIGEST, FAILING, PUSHED, WORKING, PutBuilders


def make(project: Project, **package: Any) -> tuple[dict[str, Any], list[str]]:
    """The record, and what was said."""
    said: list[str] = []
    body = {"name": "tiny", "task": "task.py:T", "codec": "codec.py:C", "package": {"base": BASE, **package}}
    return package_training(project, parse_config(body, "test"), os.environ, said.append), said


def test_a_project_becomes_an_image_named_by_its_context(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    record, said = make(project)
    folder = project.runs / "images" / f"train-{record['context'][:12]}"
    assert record["image"] == f"tiny-train:{record['context'][:12]}"
    assert json.loads((folder / "image.json").read_text()) == record
    assert (record["image_digest"], record["accelerator"]) == (f"sha256:{DIGEST}", "cpu")
    assert {path.name for path in folder.iterdir()} == {"context", "image.json", "sbom.cdx.json"}
    assert said == [f"train.image={record['image']}"]


def test_an_unchanged_project_is_not_built_again_and_a_changed_one_is(project: Project, builders: PutBuilders) -> None:
    called = builders(podman=WORKING) / "called"
    first, _ = make(project)
    builds = called.read_text().count("podman build")
    assert make(project) == (first, [f"unchanged: {first['image']}"])
    assert called.read_text().count("podman build") == builds == 1
    (project.root / "shapes.py").write_text("def size():\n    return 3\n")
    assert make(project)[0]["image"] != first["image"]
    assert called.read_text().count("podman build") == 2
    assert len(list(project.runs.glob("images/train-*/image.json"))) == 2
    assert len(list(project.runs.glob("images/train-*/context"))) == 1, "the old one's record is enough"


def test_one_that_was_not_pushed_yet_is(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    make(project, image="r.example/twice")
    record, said = make(project, image="r.example/twice", push=True)
    assert record["reference"] == f"r.example/twice-train@sha256:{PUSHED}"
    assert said == [f"train.image={record['reference']}"]


def test_without_an_image_there_is_nothing_to_train_with(project: Project, builders: PutBuilders) -> None:
    builders(podman=FAILING)
    with pytest.raises(StageError, match=r"podman could not build tiny-train:.*no space left on device"):
        make(project)
    assert not list(project.runs.glob("images/train-*"))


def test_what_is_not_installed_here_is_said(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    (project.root / "shapes.py").write_text("import not_installed_anywhere\n\n\ndef size():\n    return 2\n")
    assert "not_installed_anywhere" in make(project)[1][0]


def test_the_image_holds_what_the_project_names(project: Project, builders: PutBuilders) -> None:
    builders(podman=WORKING)
    record, _ = make(project, include=["README.md"])
    held = project.runs / "images" / f"train-{record['context'][:12]}" / "context" / "project"
    assert sorted(path.name for path in Path(held).iterdir()) == [
        "README.md", "codec.py", "pipe.yaml", "shapes.py", "task.py",
    ]  # fmt: skip
