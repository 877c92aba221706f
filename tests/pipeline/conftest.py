"""A project folder of the user's, with nothing in it that takes time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.history import create_run
from pipeline.project import Project
from pipeline.spec.bundle import Ancestors, Bundle, Manifest
from pipeline.spec.config import Config, parse_config
from pipeline.spec.run import Run
from pipeline.spec.signature import Limits, Runtime, Signature

CONFIG = "name: tiny\ntask: task.py:T\ncodec: codec.py:C\n"
TASK = "from codec import C\nfrom shapes import size\n\n\nclass T:\n    width = size()\n"
NewRun = Callable[[], Run]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pipe.yaml").write_text(CONFIG)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "codec.py").write_text("class C: ...\n")
    (tmp_path / "shapes.py").write_text("def size():\n    return 2\n")
    (tmp_path / "README.md").write_text("A tiny model.\n")
    return tmp_path


@pytest.fixture
def project(folder: Path) -> Project:
    return Project(folder, folder / "runs")


@pytest.fixture
def config() -> Config:
    return parse_config({"name": "tiny", "task": "task.py:T", "codec": "codec.py:C"}, "test")


@pytest.fixture
def new_run(project: Project, config: Config) -> NewRun:
    return lambda: create_run(project.runs, config, ("prepare", "train"), parent="")


def bundle_of(run: Run, digest: str, verdict: str = "pass") -> Bundle:
    ancestors = Ancestors(code="a", data="b", checkpoint=f"checkpoint of {digest}", verdict="d", onnx="e")
    manifest = Manifest(schema_version=1, name="tiny", verdict=verdict, ancestors=ancestors, files={})
    limits, runtime = Limits(max_batch_size=1, max_body_bytes=1), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(), outputs=(), codec="C", limits=limits, runtime=runtime)
    return Bundle(run.bundle_path, digest, manifest, signature)
