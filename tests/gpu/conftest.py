"""A small task for tests on a GPU, with dropout and batches of unequal sizes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.device.accelerator import configure_accelerator
from train.optim import set_determinism
from train.process_group import ProcessGroup
from train.trainer import Trainer


class Waves:
    inputs = ("x",)
    outputs = ("y",)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def data(self, split: str) -> dict[str, Any]:
        x = np.random.default_rng(len(split)).normal(size=(205, 8)).astype(np.float32)
        return {"x": x, "target": np.sin(x.sum(axis=1, keepdims=True) / 2)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs.float(), batch["target"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": -(outputs - batch["target"]).abs()[:, 0]}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by deterministic algorithms
    yield ProcessGroup(Rank(), torch.device("cuda", 0))
    torch.use_deterministic_algorithms(False)


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test without a C compiler, and ignore warnings that torch's compiler gives or hides by itself."""
    for ignored in (
        "ignore::DeprecationWarning",
        "ignore:TensorFloat32 tensor cores",  # the tests compare full precision
        "ignore:The .grad attribute of a Tensor that is not a leaf",
    ):
        pytest.mark.filterwarnings(ignored)(test)
    no_compiler = not (shutil.which("gcc") or shutil.which("clang"))
    pytest.mark.skipif(no_compiler, reason="no C compiler for Triton")(test)
    return test


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Raise an error if the host waits for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


EXACT = {"precision": "fp32", "matmul_precision": "highest"}  # comparable with a CPU


def make(group: ProcessGroup, task: Any = None, **train: Any) -> Trainer:
    """Return a trainer, by default of the task Waves."""
    settings = {"epochs": 4, "batch_size": 20, "lr": 0.01, "device": "cuda", "log_every": 100, **EXACT, **train}
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": settings}
    config = parse_config(values, source="test")
    task = task or Waves()
    set_determinism(config.train)
    configure_accelerator(config.train, group.device)
    splits = Samples("train", task.data("train")), Samples("validation", task.data("validation"))
    return Trainer(task, config, group, *splits, settings["batch_size"])


def losses(trainer: Trainer, steps: range) -> list[float]:
    """Make these steps and return the mean loss of each batch."""
    for step in steps:
        trainer._step(step)
    means = [
        tensor.item() / trainer.order.size(step) for step, tensor in zip(steps, trainer._window.losses, strict=True)
    ]
    trainer._open_window()
    return means
