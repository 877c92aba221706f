from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from importlib import metadata
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.version import Version

from k8s.images import build
from k8s.images.build import (
    Recipe,
    fill_arguments,
    project_content,
    write_context,
    write_requirements,
    write_training_context,
)
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.stages import Serve
from pipeline.system.errors import BundleError, ConfigError
from pipeline.system.files import digest_tree
from pipeline.system.sources import PACKAGES

TASK = """
import json
import os.path

import numpy as np
import yaml
import not_installed_anywhere
from shapes import Round
from pipeline.system import errors


class T: ...
"""
REFERENCES = ("task.py:T", "codec.py:C")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    files = {
        "task.py": TASK,
        "shapes.py": "class Round: ...\n",
        "codec.py": "class C: ...\n",
        "pipe.yaml": "name: round\n",
        "notes.txt": "nothing to do with it\n",
        "data/a.csv": "1\n",
        "data/b.csv": "2\n",
        "runs/first/run.json": "{}",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_only_defaults_of_arguments_are_replaced() -> None:
    text = "ARG BASE=a\nFROM ${BASE}\nARG BASE=a\nARG OTHER=b\nARG BASELINE=c\nARG BASE\n"
    assert fill_arguments(text, {"BASE": "z:1"}) == (
        "ARG BASE=z:1\nFROM ${BASE}\nARG BASE=z:1\nARG OTHER=b\nARG BASELINE=c\nARG BASE\n"
    )


def test_project_content_is_imported_and_included_files(project: Path) -> None:
    content = project_content(project, REFERENCES, ["data/*.csv", "data/a*"])
    assert list(content.files) == ["codec.py", "data/a.csv", "data/b.csv", "pipe.yaml", "shapes.py", "task.py"]


def test_imported_packages_are_installed_in_the_image(project: Path) -> None:
    content = project_content(project, REFERENCES, [])
    assert {name.lower() for name in content.packages} == {"numpy", "pyyaml"}
    assert content.missing == ("not_installed_anywhere",)


def test_clients_of_trackers_are_installed_in_the_image(project: Path, tmp_path: Path) -> None:
    content = project_content(project, REFERENCES, [])
    recipe = Recipe("python:3.11-slim", "cpu")
    write_training_context("round", project, content, recipe, tmp_path / "context", ["mlflow", "wandb"])
    pins = (tmp_path / "context" / "requirements-cpu.txt").read_text()
    assert {"mlflow-skinny", "sqlalchemy", "wandb", "torch"} <= {line.partition("==")[0] for line in pins.splitlines()}


def test_what_writes_samples_is_installed_in_the_image(bundle: Bundle, tmp_path: Path) -> None:
    serve = Serve(sample=0.1, sample_to="webdav://live")
    write_context(bundle, Recipe("python:3.11-slim", "cpu"), tmp_path / "context", serve.sample_packages)
    pins = (tmp_path / "context" / "requirements-cpu.txt").read_text()
    assert {"fsspec", "pyarrow"} <= {line.partition("==")[0] for line in pins.splitlines()}
    assert Serve(sample=0.1, sample_to="s3://bucket/live").sample_packages == ("fsspec", "pyarrow", "s3fs")
    assert Serve(sample=0, sample_to="s3://bucket/live").sample_packages == ()


@pytest.mark.parametrize("pattern", ["data/*.parquet", "runs/**/*"])
def test_a_pattern_without_a_file_is_an_error(pattern: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=r"package\.include: no file matches"):
        project_content(project, REFERENCES, [pattern])


def test_a_bundle_that_changes_while_it_is_copied_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    judged = replace(bundle, digest="0" * 64)
    with pytest.raises(BundleError, match=f"changed while it was copied .0{{12}} → {bundle.digest[:12]}"):
        write_context(judged, Recipe("python:3.11-slim", "cpu"), tmp_path / "context")


def test_the_training_context_is_complete_and_reproducible(project: Path, tmp_path: Path) -> None:
    content = project_content(project, REFERENCES, [])
    recipe = Recipe("python:3.11-slim", "gpu")
    first = write_training_context("round", project, content, recipe, tmp_path / "first")
    assert write_training_context("round", project, content, recipe, tmp_path / "second") == first
    assert {path.name for path in (tmp_path / "first" / "app").iterdir()} == {*PACKAGES, "pyproject.toml"}
    assert list(digest_tree(tmp_path / "first" / "project")) == ["codec.py", "pipe.yaml", "shapes.py", "task.py"]
    lines = (tmp_path / "first" / "Dockerfile").read_text().splitlines()
    assert {"ARG ACCELERATOR=gpu", f"ARG PROJECT={content.digest}", "USER 10001:10001"} <= set(lines)
    pins = (tmp_path / "first" / "requirements-gpu.txt").read_text()
    assert {"torch", "onnx", "onnxruntime-gpu[cuda,cudnn]", "safetensors"} <= {
        line.partition("==")[0] for line in pins.splitlines()
    }


def pip_calls(context: Path, folder: Path) -> list[str]:
    """Run the command of a Dockerfile that installs the packages, with a python3 that only prints its arguments."""
    text = (context / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(.+)$", text, re.MULTILINE))
    (command,) = re.findall(r"^RUN (python3 -m venv(?:.*\\\n)*.*)$", text, re.MULTILINE)
    folder.mkdir()
    (folder / "python3").write_text('#!/bin/sh\necho "$*"\n')
    (folder / "python3").chmod(0o755)
    env = {**arguments, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = command.replace("/build/", f"{context}/")
    printed = subprocess.run(["sh", "-ec", script], env=env, capture_output=True, text=True, check=True).stdout
    return [line.partition(" install ")[2] for line in printed.splitlines() if " install " in line]


def test_training_image_for_cpu_takes_torch_from_its_own_index(project: Path, tmp_path: Path) -> None:
    content = replace(project_content(project, REFERENCES, []), packages=("torch",))
    for accelerator in ("cpu", "gpu"):
        recipe = Recipe("python:3.11-slim", accelerator)
        write_training_context("round", project, content, recipe, tmp_path / accelerator)
    torch, others = pip_calls(tmp_path / "cpu", tmp_path / "bin")
    version = Version(metadata.version("torch")).public
    assert torch.endswith(f"--no-deps --index-url https://download.pytorch.org/whl/cpu torch=={version}+cpu")
    assert others.endswith("requirements-cpu.txt")
    assert "index-url" not in others
    assert len(pip_calls(tmp_path / "gpu", tmp_path / "other")) == 1, "the CUDA builds are in pip's own index"
    (tmp_path / "cpu" / "wheels" / f"torch-{version}+ours-py3-none-any.whl").touch()
    assert len(pip_calls(tmp_path / "cpu", tmp_path / "third")) == 1, "the project's own build"


def test_without_a_checkout_our_metadata_are_copied(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        (tmp_path / "site-packages" / package).mkdir(parents=True)
    monkeypatch.setattr(build, "SOURCE_ROOT", tmp_path / "site-packages")
    content = project_content(project, REFERENCES, [])
    write_training_context("round", project, content, Recipe("python:3.11-slim", "cpu"), tmp_path / "context")
    (installed,) = distributions(path=[str(tmp_path / "context" / "app")])
    assert installed.name == "pipe-road"
    assert any(need.startswith("uvloop") for need in installed.requires or [])


def test_only_required_wheels_are_copied(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    names = (
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        "torch-2.12.0-py3-none-any.whl",
        "other-1-py3-none-any.whl",
    )
    for name in names:
        (wheels / name).write_bytes(b"")
    (tmp_path / "context").mkdir()
    pins = {"cpu": ["torch==2.13.0", "numpy==2.4.6"], "gpu": ["torch==2.13.0,!=2.13.0+cpu"]}
    write_requirements(tmp_path / "context", Recipe("b", "cpu", wheels), pins)
    assert sorted(path.name for path in (tmp_path / "context" / "wheels").iterdir()) == ["README", names[0]]
