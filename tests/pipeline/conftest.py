"""A project folder whose task takes no time."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import Ancestors, Bundle, Manifest
from pipeline.contract.config import Config, parse_config
from pipeline.contract.run import Run, RunFile
from pipeline.contract.signature import Limits, Runtime, Signature
from pipeline.history import Project, create_run, write_run

from .packing import BASE, MakeRun, PutBuilders, record_export, write_bundle

CONFIG = "name: tiny\ntask: task.py:T\ncodec: codec.py:C\n"
TASK = "from codec import C\nfrom shapes import size\n\n\nclass T:\n    width = size()\n"
NewRun = Callable[[], Run]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty project folder; tests/conftest.py removes what a test imports from it."""
    return tmp_path


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


@pytest.fixture(params=["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, such as Lustre, NFS and others answer."""
    number = getattr(errno, request.param)

    def flock(*_: object) -> None:
        raise OSError(number, request.param)

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.fixture
def new_run(project: Project, config: Config) -> NewRun:
    return lambda: create_run(project.runs, config, ("prepare", "train"), parent="")


def bundle_of(run: Run, digest: str, verdict: str = "pass") -> Bundle:
    ancestors = Ancestors(code="a", data="b", checkpoint=f"checkpoint of {digest}", verdict="d", onnx="e")
    manifest = Manifest(schema_version=1, name="tiny", verdict=verdict, ancestors=ancestors, files={})
    limits, runtime = Limits(max_batch_size=1, max_body_bytes=1), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(), outputs=(), codec="C", limits=limits, runtime=runtime)
    return Bundle(run.bundle_path, digest, manifest, signature)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "first", verdict: str = "pass", **sections: dict[str, Any]) -> Run:
        run = Run(tmp_path / "runs" / name)
        write_bundle(run.bundle_path, verdict)
        named = {**sections, "package": {"base_image": BASE, **sections.get("package", {})}}
        config = {"name": "twice", "task": "task.py:T", "codec": "codec.py:C", **named}
        file = RunFile(id=name, created="2026-01-01", wanted=("package",), config=config, environment={})
        write_run(run, file)
        record_export(run)
        run.partial("package").mkdir()
        return run

    return make


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutBuilders:
    """Return a function that makes these programs the only image builders on the PATH."""

    def put(**scripts: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("sh", "dirname", "basename", "cp", "cat"):
            found = next(path for place in ("/bin", "/usr/bin") if (path := Path(place, tool)).exists())
            (folder / tool).symlink_to(found)
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return folder

    return put
