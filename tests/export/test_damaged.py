"""Files that were damaged on purpose, each stopped by the check that should stop it; the whole one passes them all."""

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

from export.kinds import open_kind
from export.optimize import fit_runtime
from export.subject import Subject
from export.to_onnx import ExportResult, convert
from export.verify import verify_file
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import COUNT, Classes


class Net(nn.Module):
    """Of each kind of layer that is known to go wrong, one."""

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
    """Which check ends the export, and its words."""
    try:
        fit_runtime(path)
        report = verify_file(open_kind(replace(whole.subject, path=path)), whole.written)
    except StageError as error:
        return next((kind for words, kind in CHECKS.items() if words in str(error)), "unknown"), str(error)
    try:
        report.require(whole.subject.config)
    except StageError as error:
        apart = [row for row in report.runs if row["beyond_tolerance"]]
        return "test set" if apart else "chance", str(error)
    return "", ""


CHECKS = {
    "not sound by ONNX's own rules": "checker",
    "which is not a regular file next to it": "weights",
    "is in training mode": "training",
    "became fixed": "axes",
    "cannot load it": "runtime",
}
Change = Callable[[onnx.ModelProto], Any]


def weights(shape: tuple[int, ...], change: Callable[[Any], Any], which: int = 0) -> Change:
    """Of a weight found by its shape: names are the exporter's business."""

    def damage(model: onnx.ModelProto) -> None:
        found = [one for one in model.graph.initializer if tuple(one.dims) == shape]
        values = change(numpy_helper.to_array(found[which]).copy())
        found[which].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), found[which].name))

    return damage


def node_of(model: onnx.ModelProto, kind: str, which: int = 0) -> onnx.NodeProto:
    found: list[onnx.NodeProto] = [node for node in model.graph.node if node.op_type == kind]
    return found[which]


def attribute(kind: str, name: str, value: Any) -> Change:
    def damage(model: onnx.ModelProto) -> None:
        node = node_of(model, kind)
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return damage


def zeroed(values: Any) -> Any:
    values[len(values) // 2 :] = 0
    return values


def spoilt(values: Any) -> Any:
    values.flat[0] = np.nan
    return values


def rewired(kind: str, node: onnx.NodeProto) -> Change:
    """`node` between the first of a kind and who reads it."""

    def damage(model: onnx.ModelProto) -> None:
        before = node_of(model, kind)
        place = list(model.graph.node).index(before) + 1
        node.input[0], node.output[0] = f"{before.output[0]}_new", before.output[0]
        before.output[0] = node.input[0]
        model.graph.node.insert(place, node)

    return damage


def swapped(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.output[:] = [{"scores": "shares", "shares": "scores"}.get(name, name) for name in node.output]


def unbent(model: onnx.ModelProto) -> None:
    node_of(model, "Relu", -1).op_type = "Identity"


def of_the_batch(model: onnx.ModelProto) -> None:
    node = node_of(model, "BatchNormalization")
    node.attribute.append(helper.make_attribute("training_mode", 1))
    node.output.extend(["mean_of_batch", "variance_of_batch"])


def dropping(model: onnx.ModelProto) -> None:
    for name, array in (("ratio", np.array(0.5, np.float32)), ("on", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    rewired("Conv", helper.make_node("Dropout", ["x", "ratio", "on"], ["y"], name="dropout"))(model)


def silent(model: onnx.ModelProto) -> None:
    """For pictures of more contrast than all of the test set, which only chance has, every score is nought."""
    most = np.array(np.abs(PIXELS).sum(axis=(1, 2, 3)).max() + 0.1, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(most, "brightest"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3]), "own_axes"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 1]), "a_column"))
    node_of(model, "Gemm", -1).output[0] = "loud"
    for kind, given, made, message in (
        ("ReduceL1", ["x", "own_axes"], "sum", {"keepdims": 0}),
        ("Less", ["sum", "brightest"], "fine", {}),
        ("Cast", ["fine"], "factor", {"to": TensorProto.FLOAT}),
        ("Reshape", ["factor", "a_column"], "factors", {}),
        ("Mul", ["loud", "factors"], "scores", {}),
    ):
        model.graph.node.append(helper.make_node(kind, given, [made], name=f"silent_{made}", **message))


def fixed(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3


def narrow(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5


def cut(model: onnx.ModelProto) -> None:
    node_of(model, "Softmax").input[0] = "gone"


def backwards(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))


def doubled(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def foreign(model: onnx.ModelProto) -> None:
    node_of(model, "Relu").domain = "foreign.domain"
    model.opset_import.append(helper.make_opsetid("foreign.domain", 1))


def elsewhere(model: onnx.ModelProto) -> None:
    tensor = next(one for one in model.graph.initializer if len(one.raw_data) > 64)
    onnx.external_data_helper.set_external_data(tensor, "../weights")
    tensor.ClearField("raw_data")


NOT_EQUAL = "the ONNX file is not the model"
DAMAGES: dict[str, tuple[Change, str, str]] = {
    "transposed weights": (
        weights((6, 6), lambda one: one.T),
        "test set",
        r"\(Gemm\), off by .* of `square` \(Linear\)",
    ),
    "shifted labels": (weights((6, 6), lambda one: np.roll(one, 1, 0), -1), "test set", "predictions flip without"),
    "half the classes zero": (weights((6, 6), zeroed, -1), "test set", r"of `head` \(Linear\)"),
    "a weight that is no number": (weights((6, 18), spoilt), "test set", r"of `body` \(Linear\)"),
    "a bias a little off": (weights((6,), lambda one: one + 0.01), "test set", "0 predictions flip"),
    "swapped outputs": (swapped, "test set", NOT_EQUAL),
    "a missing bend": (unbent, "test set", r"\(Identity\), off by .* test_damaged\.py line"),
    "padding off by one": (attribute("Conv", "pads", [2, 2, 0, 0]), "test set", r"\(Conv\), off by .* of `pixels`"),
    "softmax over the batch": (attribute("Softmax", "axis", 0), "test set", r"\(Softmax\)"),
    "dropout left on": (dropping, "training", r"`dropout` \(Dropout\) is in training mode"),
    "wrong where no sample is": (silent, "chance", r"random inputs \(CPU.*`silent_scores` \(Mul\)"),
    "batch norm in train mode": (of_the_batch, "training", r"\(BatchNormalization\) is in training mode"),
    "a fixed batch axis": (fixed, "axes", "the batch axis of `x` became fixed"),
    "one class too few declared": (narrow, "checker", r"5|scores"),
    "a tensor without producer": (cut, "checker", "gone"),
    "nodes in the wrong order": (backwards, "checker", "sorted"),
    "another type of input": (doubled, "checker", "elem type differs"),
    "an operator of another domain": (foreign, "runtime", r"foreign\.domain"),
    "weights outside the bundle": (elsewhere, "weights", r"keeps weights in '\.\./weights'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_stopped_by_the_check_that_should_stop_it(whole: Whole, tmp_path: Path, name: str) -> None:
    change, check, words = DAMAGES[name]
    model = onnx.load(whole.subject.path)
    change(model)
    path = tmp_path / "bundle" / "model.onnx"
    path.parent.mkdir()
    (tmp_path / "weights").write_bytes(bytes(1024))
    path.write_bytes(model.SerializeToString())
    found, output = stopped_by(whole, path)
    assert found == check, output
    assert re.search(words, output), output


def test_the_whole_file_passes_every_check(whole: Whole, tmp_path: Path) -> None:
    shutil.copy(whole.subject.path, tmp_path / "model.onnx")
    assert stopped_by(whole, tmp_path / "model.onnx") == ("", "")


def test_a_file_that_was_cut_short_is_stopped(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(whole.subject.path.read_bytes()[:-200])
    assert stopped_by(whole, tmp_path / "model.onnx")[0] == "checker"
