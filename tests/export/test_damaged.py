"""Unsound files are each stopped by the check that is meant for them; a sound one passes all checks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.checks.verify import verify_file
from export.conversion.optimize import fit_runtime
from export.conversion.to_onnx import ExportResult, convert
from export.kinds import open_exporter
from export.subject import Subject
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import COUNT, Classes


class Net(nn.Module):
    """Layers of several kinds: normalization, convolution and products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(1)
        self.pixels = nn.Conv2d(1, 2, 3, padding=1)
        self.body = nn.Linear(18, 6)
        self.square = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        self.norm.running_mean = torch.tensor([0.3])
        self.norm.running_var = torch.tensor([2.0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.pixels(self.norm(x).relu()).relu().flatten(1)
        found = self.square(self.body(found).relu())
        return self.head(found), found.softmax(dim=1)


@dataclass
class Pictures(Classes):
    outputs: tuple[str, ...] = ("scores", "shares")
    classes: tuple[str, ...] = tuple("abcdef")

    def predicted(self, outputs: Any) -> Tensor:
        found: Tensor = outputs["scores"].argmax(dim=1)
        return found


PIXELS = np.random.default_rng(0).normal(size=(COUNT, 1, 3, 3)).astype(np.float32)


@dataclass(frozen=True)
class Whole:
    subject: Subject
    written: ExportResult


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    task: Any = Pictures(Net().eval(), {"x": PIXELS, "label": np.arange(COUNT) % 6})
    config, test = Export(batch_sizes=(1, 7, COUNT)), open_split(task, "test")
    path = tmp_path_factory.mktemp("whole") / "model.onnx"
    written = convert(task.net, task, test.batch(range(3)), config, path)
    return Whole(Subject(task, task.net, test, config, path), written)


def stopped_by(whole: Whole, path: Path) -> tuple[str, str]:
    """Return the check that ends the export, and its message."""
    try:
        fit_runtime(path)
        report = verify_file(open_exporter(replace(whole.subject, path=path)), whole.written)
    except StageError as error:
        return next((check for text, check in CHECKS.items() if text in str(error)), "unknown"), str(error)
    try:
        report.require(whole.subject.config)
    except StageError as error:
        differing = [row for row in (*report.test_set, *report.shapes) if row["beyond_tolerance"]]
        return "test set" if differing else "random inputs", str(error)
    return "", ""


CHECKS = {
    "not sound by ONNX's own rules": "checker",
    "which is not a regular file next to it": "weights",
    "is in training mode": "training",
    "became fixed": "axes",
    "cannot load it": "runtime",
}
Change = Callable[[onnx.ModelProto], Any]


def node_of(model: onnx.ModelProto, kind: str, which: int = 0) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = [node for node in model.graph.node if node.op_type == kind]
    return nodes[which]


def insert_after(kind: str, node: onnx.NodeProto) -> Change:
    """Insert `node` after the first node of a kind."""

    def damage(model: onnx.ModelProto) -> None:
        before = node_of(model, kind)
        place = list(model.graph.node).index(before) + 1
        node.input[0], node.output[0] = f"{before.output[0]}_new", before.output[0]
        before.output[0] = node.input[0]
        model.graph.node.insert(place, node)

    return damage


def train_batch_norm(model: onnx.ModelProto) -> None:
    node = node_of(model, "BatchNormalization")
    node.attribute.append(helper.make_attribute("training_mode", 1))
    node.output.extend(["mean_of_batch", "variance_of_batch"])


def leave_dropout_on(model: onnx.ModelProto) -> None:
    for name, array in (("ratio", np.array(0.5, np.float32)), ("on", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    insert_after("Conv", helper.make_node("Dropout", ["x", "ratio", "on"], ["y"], name="dropout"))(model)


def zero_bright_pictures(model: onnx.ModelProto) -> None:
    """Make all scores zero for pictures brighter than those of the test set, which only random inputs are."""
    most = np.array(np.abs(PIXELS).sum(axis=(1, 2, 3)).max() + 0.1, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(most, "brightest"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3]), "own_axes"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 1]), "column"))
    node_of(model, "Gemm", -1).output[0] = "scores_before"
    for kind, inputs, output, attributes in (
        ("ReduceL1", ["x", "own_axes"], "sum", {"keepdims": 0}),
        ("Less", ["sum", "brightest"], "is_darker", {}),
        ("Cast", ["is_darker"], "factor", {"to": TensorProto.FLOAT}),
        ("Reshape", ["factor", "column"], "factors", {}),
        ("Mul", ["scores_before", "factors"], "scores", {}),
    ):
        model.graph.node.append(helper.make_node(kind, inputs, [output], name=f"bright_{output}", **attributes))


def fix_batch_axis(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3


def declare_one_class_less(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5


def remove_producer(model: onnx.ModelProto) -> None:
    node_of(model, "Softmax").input[0] = "gone"


def reverse_nodes(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))


def declare_doubles(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def use_foreign_operator(model: onnx.ModelProto) -> None:
    node_of(model, "Relu").domain = "foreign.domain"
    model.opset_import.append(helper.make_opsetid("foreign.domain", 1))


def store_weights_outside(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if len(tensor.raw_data) > 64)
    onnx.external_data_helper.set_external_data(tensor, "../weights")
    tensor.ClearField("raw_data")


DAMAGES: dict[str, tuple[Change, str, str]] = {
    "dropout left on": (leave_dropout_on, "training", r"`dropout` \(Dropout\) is in training mode"),
    "wrong beyond the test set": (
        zero_bright_pictures,
        "random inputs",
        r"random inputs \(CPU.*`bright_scores` \(Mul\)",
    ),
    "batch norm in train mode": (train_batch_norm, "training", r"\(BatchNormalization\) is in training mode"),
    "a fixed batch axis": (fix_batch_axis, "axes", "the batch axis of `x` became fixed"),
    "one class too few declared": (declare_one_class_less, "checker", r"5|scores"),
    "a tensor without producer": (remove_producer, "checker", "gone"),
    "nodes in the wrong order": (reverse_nodes, "checker", "sorted"),
    "another type of input": (declare_doubles, "checker", "elem type differs"),
    "an operator of another domain": (use_foreign_operator, "runtime", r"foreign\.domain"),
    "weights outside the bundle": (store_weights_outside, "weights", r"keeps weights in '\.\./weights'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_unsound_file_is_stopped_by_its_check(whole: Whole, tmp_path: Path, name: str) -> None:
    change, check, pattern = DAMAGES[name]
    model = onnx.load(whole.subject.path)
    change(model)
    path = tmp_path / "bundle" / "model.onnx"
    path.parent.mkdir()
    (tmp_path / "weights").write_bytes(bytes(1024))
    path.write_bytes(model.SerializeToString())
    stopping_check, message = stopped_by(whole, path)
    assert stopping_check == check, message
    assert re.search(pattern, message), message


def test_sound_file_passes_every_check(whole: Whole, tmp_path: Path) -> None:
    shutil.copy(whole.subject.path, tmp_path / "model.onnx")
    assert stopped_by(whole, tmp_path / "model.onnx") == ("", "")


def test_truncated_file_is_stopped(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(whole.subject.path.read_bytes()[:-200])
    assert stopped_by(whole, tmp_path / "model.onnx")[0] == "checker"
