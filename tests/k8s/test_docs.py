"""The commands and files in the pages about Kubernetes work, as far as they need no cluster."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from k8s.objects import serving
from k8s.objects.jobs import step_job
from k8s.objects.kustomize import build
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import parse_config
from pipeline.executors.cluster import render_training, render_workflow
from pipeline.history import Project, example_folder
from pipeline.system.sources import SOURCE_ROOT

from .invariants import check
from .schemas import validate

TEXT = "".join(path.read_text() for path in sorted((SOURCE_ROOT / "docs").glob("kubernetes*.md")))
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
IMAGE = "registry.example/serve@sha256:" + "1" * 64


def lines(language: str) -> list[list[str]]:
    return [shlex.split(line) for kind, body in BLOCKS if kind == language for line in body.splitlines()]


def test_every_documented_folder_builds_and_is_valid() -> None:
    folders = [words[words.index("-k") + 1] for words in lines("text") if words[0] == "kubectl" and "-k" in words]
    assert folders
    for folder in folders:
        objects = build(SOURCE_ROOT / folder)
        check(objects)
        for item in objects:
            validate(item)


def test_the_documented_overlays_are_those_that_exist() -> None:
    rows = re.findall(r"^\| `(k8s/manifests/\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE)
    assert len(rows) == 3
    for folder, names in rows:
        assert sorted(re.findall(r"`([\w-]+)`", names)) == sorted(
            path.name for path in (SOURCE_ROOT / folder / "overlays").iterdir()
        )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files of the document."""
    for _, body in BLOCKS:
        if (found := re.match(r"# file: (\S+)\n", body)) is not None:
            (tmp_path / found[1]).parent.mkdir(exist_ok=True)
            (tmp_path / found[1]).write_text(body)
    return tmp_path


def test_documented_overlay_is_valid_with_the_service(files: Path, bundle: Bundle) -> None:
    config = parse_config({"name": "digits", "task": "t.py:T", "codec": "c.py:C"}, "docs")
    objects = serving.serving_objects(config, bundle, IMAGE, overlay=files / "cluster")
    check(objects)
    for item in objects:
        validate(item)
    assert objects[-1]["kind"] == "ServiceMonitor"


@pytest.mark.parametrize(("step", "training"), [("prepare", False), ("train", True)])
def test_documented_overlay_of_the_cluster_reaches_training(files: Path, step: str, training: bool) -> None:
    train = {"image": f"registry.example/train@sha256:{'0' * 64}", "device": "cuda"}
    config = parse_config({"name": "digits", "task": "t.py:T", "codec": "c.py:C", "train": train}, "docs")
    *_, job = step_job(config, step, "r", "k", ("x", "runs/r"), {}, overlay=files / "pods").objects
    validate(job)
    text = json.dumps(job)
    assert '"mountPath": "/data"' in text
    for part in ('"rdma/hca": 1', "IPC_LOCK", "NCCL_IB_HCA", "podset-required-topology"):
        assert (part in text) == training


def test_the_documented_custom_manifests_build(files: Path) -> None:
    shutil.copytree(SOURCE_ROOT / "k8s", files / "k8s", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    objects = build(files / "my-model")
    check(objects)
    (deployment,) = (item for item in objects if item["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith("registry.example/flowers@")


@pytest.mark.parametrize("body", [body for kind, body in BLOCKS if kind == "yaml" and not body.startswith("# file:")])
def test_every_documented_configuration_gives_valid_objects(body: str, bundle: Bundle, tmp_path: Path) -> None:
    config = parse_config({"name": "twice", "task": "t.py:T", "codec": "c.py:C", **yaml.safe_load(body)}, "docs")
    objects = serving.serving_objects(config, bundle, config.deploy.image or IMAGE)
    project = Project(tmp_path, tmp_path / "runs")
    image = config.train.model_copy(update={"image": config.train.image or IMAGE})
    files = render_training(project, config.model_copy(update={"train": image}), "default")
    trained = [yaml.safe_load(file.read_text()) for file in files if file.name != "kustomization.yaml"]
    for made in (objects, trained):
        check(made)
        for item in made:
            validate(item)


def test_every_documented_rendering_works(tmp_path: Path) -> None:
    project, done = Project(example_folder("starter"), tmp_path / "runs"), 0
    for words in lines("sh"):
        overrides = [word for word in words if "=" in word]
        if words[:3] == ["pipe", "run", "train"]:
            assert render_training(project, project.config(overrides), str(tmp_path / words[4]))
            done += 1
        if words[:2] == ["pipe", "plan"] and "--workflow" in words:
            engine, folder = (words[words.index(option) + 1] for option in ("--workflow", "--render"))
            for file in render_workflow(project, project.config(overrides), engine, str(tmp_path / folder)):
                assert f"{file.parent.name}/{file.name}" in TEXT
            done += 1
    assert done == 3
