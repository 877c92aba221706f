"""Models of every kind the export supports, each with its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.checks.cases import torch_outputs
from export.checks.parity import compare_test_set
from export.compare import Rows
from export.conversion.to_onnx import ExportResult, convert
from export.kinds import open_exporter
from export.sessions import open_graph
from export.subject import ModelExporter, Subject
from pipeline.contract.data import Samples, open_split
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Task

COUNT = 23  # no batch size divides it


@dataclass
class Small:
    """A task around any model."""

    net: nn.Module
    columns: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("y",)
    extra: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        return self.net

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        return self.columns

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return torch.zeros(())

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ones": torch.ones(COUNT)}


@dataclass
class Classes(Small):
    classes: tuple[str, ...] = ("a", "b", "c")

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["label"]


def pairs() -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32), "label": np.arange(COUNT) % 3}


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))


@dataclass(frozen=True)
class Exported:
    task: Task
    model: nn.Module
    test: Samples
    path: Path
    config: Export
    written: ExportResult

    @property
    def kind(self) -> ModelExporter:
        return open_exporter(Subject(self.task, self.model, self.test, self.config, self.path))

    def test_set_rows(self) -> Rows:
        reference = torch_outputs(self.task, self.model, self.test, max(self.config.batch_sizes))
        return compare_test_set(open_graph(self.path), self.task, self.test, reference, self.config, {})

    def shape_rows(self) -> Rows:
        return next(self.kind.phases(self.written)).shapes


def open_model(task: Any, path: Path, config: Export | None = None, model: nn.Module | None = None) -> ModelExporter:
    return open_exporter(Subject(task, model or task.net, open_split(task, "test"), config or Export(), path))


Exporter = Callable[..., Exported]


@pytest.fixture
def exported(tmp_path: Path) -> Exporter:
    """Convert a task's model; keywords are settings of the export."""

    def make(task: Any, name: str = "bundle", **settings: Any) -> Exported:
        config = Export(**settings)
        model, test, path = task.model().eval(), open_split(task, "test"), tmp_path / name / "model.onnx"
        path.parent.mkdir()
        written = convert(model, task, test.batch(range(3)), config, path)
        return Exported(task, model, test, path, config, written)

    return make
