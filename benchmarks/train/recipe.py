"""The mathematics that all loops share: order of samples, learning rate, clipping, what is decayed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from pipeline.system.processes import Rank
from train.batch_order import BatchOrder
from train.optim import learning_rate

PEAK = 1e-3
WEIGHT_DECAY = 0.01
WARMUP = 0.05
CLIP_NORM = 1.0
LOG_EVERY = 10
EPOCHS = 4


def train_section(batch_size: int) -> dict[str, Any]:
    """Return the recipe as settings of `pipe.yaml`."""
    return {
        "epochs": EPOCHS,
        "batch_size": batch_size,
        "lr": PEAK,
        "weight_decay": WEIGHT_DECAY,
        "warmup_ratio": WARMUP,
        "clip_norm": CLIP_NORM,
        "log_every": LOG_EVERY,
        "device": "cpu",
    }


class Plan:
    """Which samples and which learning rate each step takes."""

    def __init__(self, task: Task, batch_size: int, rank: Rank) -> None:
        source = task.data("train")
        assert isinstance(source, Mapping)
        self._columns = {name: torch.as_tensor(column) for name, column in source.items()}
        self._order = BatchOrder(len(next(iter(self._columns.values()))), batch_size, seed=0)
        self._rank = rank

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield this process's slice of each batch, from memory."""
        for step in itertools.count():
            indices = self._order.batch(step)
            own_slice = self._rank.slice_of(len(indices))
            index = torch.from_numpy(indices[own_slice.start : own_slice.stop])
            yield {name: column[index] for name, column in self._columns.items()}

    def rate(self, step: int) -> float:
        return learning_rate(step, EPOCHS * self._order.steps_per_epoch, Train(lr=PEAK, warmup_ratio=WARMUP))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
