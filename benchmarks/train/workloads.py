"""What the loops are raced on: the digits net, a larger convolutional net, a tiny transformer. All in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.transformer import Transformer
from pipeline.contract.task import Task, load_task
from pipeline.history import example_folder

if TYPE_CHECKING:
    from pipeline import Batch, Outputs


SAMPLES = 1 << 15  # so many that no epoch ends inside a race
COPIES = 200  # of the digits' training split, for the same reason


@dataclass(frozen=True)
class Workload:
    make: Callable[[], Task]
    batch_size: int  # over all processes
    lap: int  # steps between two starts


class Synthetic:
    """Random samples, the same ones at every start; a race needs no meaning."""

    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("scores",)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        return functional.cross_entropy(outputs.flatten(0, -2), batch["target"].flatten())

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        assert isinstance(outputs, Tensor)
        hits = (outputs.argmax(dim=-1) == batch["target"]).float()
        return {"accuracy": hits.reshape(len(hits), -1).mean(dim=1)}


class Convolution(Synthetic):
    """Pictures of 16×16 through six convolutions with batch norm."""

    def model(self) -> nn.Module:
        widths = (3, 32, 32, 64, 64, 128, 128)
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            stride = 2 if i in (2, 4) else 1
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        pictures = torch.randn(256, 3, 16, 16, generator=generator).repeat(SAMPLES // 256, 1, 1, 1)
        return {"x": pictures, "target": torch.randint(10, (SAMPLES,), generator=generator)}


class Language(Synthetic):
    """A transformer of three blocks that predicts the next of 96 characters."""

    def model(self) -> nn.Module:
        return Transformer(vocabulary=96, width=96, heads=4, depth=3, length=48)

    def data(self, split: str) -> dict[str, Tensor]:
        text = torch.randint(96, (SAMPLES, 49), generator=torch.Generator().manual_seed(len(split)))
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def _digits() -> Task:
    """Return the example's own task, with its short training split repeated."""
    task = load_task("task.py:Digits", example_folder("digits"))
    original = task.data

    def data(split: str) -> dict[str, Tensor]:
        columns = original(split)
        assert isinstance(columns, Mapping)
        return {name: torch.cat([torch.as_tensor(column)] * COPIES) for name, column in columns.items()}

    task.data = data  # type: ignore[method-assign]
    return task


WORKLOADS = {
    "digits": Workload(_digits, batch_size=64, lap=60),
    "conv": Workload(Convolution, batch_size=32, lap=20),
    "transformer": Workload(Language, batch_size=16, lap=20),
}

TEXTS = "deepseek"  # needs what `pip install pipe-road[deepseek]` brings, so it runs only when requested


def workload(name: str) -> Workload:
    if name == TEXTS:
        from benchmarks.train.deepseek import PACKED

        return PACKED
    return WORKLOADS[name]
