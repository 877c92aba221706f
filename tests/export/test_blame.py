"""A failed parity says where: in which node of the file, or in which module that was traced as another."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from export.blame import blame
from export.proof import feeds, prove
from pipeline.spec.data import open_split
from pipeline.spec.errors import StageError
from pipeline.spec.sections import Export

from .conftest import Exported, Exporter, Small, pairs


class Sneaky(nn.Module):
    """Other than it is, while anybody traces it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_compiling() else x * 1.5


def layers(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, 3))


def damaged(made: Exported, name: str) -> str:
    """What is said of the file with one weight transposed and half of it forgotten."""
    model = onnx.load(made.path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(name))
    values = numpy_helper.to_array(tensor).copy()
    values[: len(values) // 2] = 0
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, made.path)
    return blame(made.written, made.path, feeds(made.task, made.test), made.config)


def test_a_damaged_weight_is_told_by_node_module_and_line(exported: Exporter) -> None:
    made = exported(Small(layers(nn.ReLU()), pairs()))
    assert blame(made.written, made.path, feeds(made.task, made.test), made.config) == ""
    said = damaged(made, "3.weight")
    assert said.startswith("the first node that is wrong is `node_")
    assert "(Gemm), off by" in said
    assert said.endswith("of `3` (Linear)"), said
    assert damaged(made, "0.weight").endswith("of `0` (Linear)"), "of two faults the earlier"


def test_a_module_that_was_traced_as_another_is_named(tmp_path: Any) -> None:
    task: Any = Small(layers(Sneaky()), pairs())
    proven = prove(task, task.net, open_split(task, "test"), Export(), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=r"the trace is not the model: it answers otherwise in `2`, off by .* python"):
        proven.require()


class Short(nn.Module):
    """Decides by a length, which a trace takes for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 5 else x * 2


def test_a_length_that_decides_is_told_with_where_the_trace_holds(tmp_path: Any) -> None:
    task: Any = Small(layers(Short()), pairs())
    proven = prove(task, task.net, open_split(task, "test"), Export(), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=r"torch's guards say that the trace holds for `batch` max=5 alone"):
        proven.require()
    assert np.isfinite([one["max_abs_error"] for one in proven.comparisons]).all()
