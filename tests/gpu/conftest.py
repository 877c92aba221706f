"""What the tests on a GPU train: small enough for seconds, with dropout, and batches that no size divides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.processes import Rank
from train.optim import be_deterministic
from train.process_group import Group
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
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic algorithms
    yield Group(Rank(), torch.device("cuda", 0))
    torch.use_deterministic_algorithms(False)


def make(group: Group, **train: Any) -> Trainer:
    words = {"epochs": 4, "batch_size": 20, "lr": 0.01, "device": "cuda", "log_every": 100, **train}
    body = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": words}
    config = parse_config(body, source="test")
    task: Any = Waves()
    be_deterministic(config.train)
    splits = Samples("train", task.data("train")), Samples("validation", task.data("validation"))
    return Trainer(task, config, group, *splits, words["batch_size"])


def losses(trainer: Trainer, steps: range) -> list[float]:
    """Of whole batches, one a step."""
    for step in steps:
        trainer._step(step)
    found = [
        tensor.item() / trainer.order.size(step) for step, tensor in zip(steps, trainer._window.losses, strict=True)
    ]
    trainer._open_window()
    return found
