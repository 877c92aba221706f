"""Runs of several real processes, and comparisons between them."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.contract.run import Run
from train.checkpoint.format import decode_manifest
from train.checkpoint.load import open_checkpoint
from train.checkpoint.storage import LocalStorage

from ...fork_server import launch
from ..conftest import Project, journal, weights


def trained(project: Project, name: str, processes: int, **settings: Any) -> Run:
    run = project.run(name, **settings)
    done = project.train(run, processes)
    assert done.returncode == 0, done.stderr
    return run


def resumed(project: Project, whole: Run, name: str, after: int, processes: int, **settings: Any) -> Run:
    """Train a run that resumes from a checkpoint of another one."""
    run = project.run(name, **settings)
    shutil.copytree(whole.partial("train"), run.partial("train"))
    for path in (run.partial("train") / "checkpoints").iterdir():
        if int(path.name[5:]) > after:
            shutil.rmtree(path)
    done = project.train(run, processes)
    assert f"resumed from the checkpoint of step {after} of" in done.stdout, done.stderr
    return run


def script(project: Project, program: str, processes: int) -> str:
    """Return what a program prints that is started like training."""
    (project.root / "program.py").write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = launch(("program.py",), project.root, processes, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in journal(run) if "loss" in line]


def checkpoint(run: Run, step: int) -> dict[str, Tensor]:
    """Return weights and optimizer state."""
    storage = LocalStorage(run.partial("train") / "checkpoints")
    return dict(open_checkpoint(storage, step, decode_manifest(storage.manifest(step)).identity).tensors(""))


def weights_after(run: Run, step: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in checkpoint(run, step).items() if name.startswith("weights.")}


def assert_close(left: Run, right: Run, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(weights(left), weights(right), rtol=rtol, atol=atol)
    assert losses(left) == pytest.approx(losses(right), rel=rtol)


@pytest.fixture
def transformer(project: Project) -> Project:
    text = (Path(__file__).parent / "transformer.py").read_text()
    (project.root / "task.py").write_text(text)
    return project
