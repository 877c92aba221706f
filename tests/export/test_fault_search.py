"""The search for the first wrong node in damaged, quantized, optimized and fp16 copies of a small graph.

A failed comparison names a node of the file, or a module that was traced differently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.checks.fault_search import (
    FirstWrong,
    Graph,
    explain_difference,
    find_first_wrong,
    find_first_wrong_by_values,
)
from export.checks.verify import write_and_compare
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import Exported, Exporter, Small, open_model, pairs

LAYERS = 24
FEED = {"x": np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)}


def chain(path: Path, layers: int = LAYERS) -> Path:
    """Write layers of product, tanh and sum, with a residual connection around every four of them."""
    rng, nodes, weights, before, kept = np.random.default_rng(0), [], [], "x", "x"
    for layer in range(layers):
        made = "y" if layer == layers - 1 else f"h{layer}"
        weights.append(numpy_helper.from_array((rng.normal(size=(8, 8)) / 4).astype(np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{layer}"], [f"p{layer}"], name=f"product{layer}"))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [f"t{layer}"], name=f"bend{layer}"))
        other = kept if layer % 4 == 3 else f"p{layer}"
        nodes.append(helper.make_node("Add", [f"t{layer}", other], [made], name=f"sum{layer}"))
        before, kept = made, made if layer % 4 == 3 else kept
    value = helper.make_tensor_value_info
    given, answered = ([value(name, TensorProto.FLOAT, ["batch", 8])] for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph(nodes, "chain", given, answered, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("chain") / "whole.onnx")


def changed(whole: Path, folder: Path, change: Callable[[onnx.GraphProto], Any], **how: Any) -> Path:
    model = onnx.load(whole)
    change(model.graph)
    onnx.save(model, folder / "changed.onnx", **how)
    return folder / "changed.onnx"


def transposed(layer: int) -> Callable[[onnx.GraphProto], Any]:
    def change(graph: onnx.GraphProto) -> None:
        weight = next(tensor for tensor in graph.initializer if tensor.name == f"w{layer}")
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), weight.name))

    return change


def find(whole: Path, other: Path, tolerance: float = 1e-4) -> FirstWrong | None:
    return find_first_wrong(whole, other, FEED, tolerance, tolerance)


@pytest.mark.parametrize("layer", [0, 1, 11, LAYERS - 1])
def test_node_that_reads_a_damaged_weight_is_named(whole: Path, tmp_path: Path, layer: int) -> None:
    found = find(whole, changed(whole, tmp_path, transposed(layer)))
    assert found is not None
    assert (found.node, found.op) == (f"product{layer}", "MatMul")
    assert found.error > 0.01


def test_equal_file_has_no_fault(whole: Path) -> None:
    assert find(whole, whole) is None


def test_earlier_of_two_faults_is_named(whole: Path, tmp_path: Path) -> None:
    once = changed(whole, tmp_path, transposed(6))
    found = find(whole, changed(once, tmp_path, transposed(15)))
    assert found is not None
    assert found.node == "product6"


def test_search_takes_logarithmically_many_runs(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []
    run = Graph.run

    def counted(self: Graph, feed: Any, names: Any) -> Any:
        requested.append(len(names))
        return run(self, feed, names)

    monkeypatch.setattr(Graph, "run", counted)
    assert find(whole, changed(whole, tmp_path, transposed(13))) is not None
    assert len(requested) <= 2 * (math.ceil(math.log2(3 * LAYERS)) + 2)
    assert max(requested) <= 4, "a cut is narrow"


def test_removed_names_are_matched_by_order(whole: Path, tmp_path: Path) -> None:
    def renamed(graph: onnx.GraphProto) -> None:
        transposed(9)(graph)
        for node in graph.node:
            node.name = ""
            for names in (node.input, node.output):
                names[:] = [name if name in {"x", "y"} or name[0] == "w" else f"new_{name}" for name in names]

    found = find(whole, changed(whole, tmp_path, renamed))
    assert found is not None
    assert (found.node, found.op) == ("new_p9", "MatMul"), "a node without a name is called by what it makes"


def test_quantized_values_are_compared_after_dequantization(whole: Path, tmp_path: Path) -> None:
    def quantized(scale: float) -> Callable[[onnx.GraphProto], Any]:
        def change(graph: onnx.GraphProto) -> None:
            graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), "scale"))
            graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), "zero"))
            place = next(index for index, node in enumerate(graph.node) if node.name == "sum10")
            graph.node[place + 1].input[0] = "h10_back"
            pair = [("QuantizeLinear", "h10", "h10_small"), ("DequantizeLinear", "h10_small", "h10_back")]
            nodes = [helper.make_node(kind, [left, "scale", "zero"], [right]) for kind, left, right in pair]
            later = list(graph.node)[place + 1 :]
            del graph.node[place + 1 :]
            graph.node.extend([*nodes, *later])

        return change

    fine = changed(whole, tmp_path, quantized(0.02))
    assert find(whole, fine, 0.2) is None
    found = find(whole, changed(whole, tmp_path, quantized(0.001)), 0.2)  # clips all beyond 0.127
    assert found is not None
    assert (found.node, found.op) == ("sum10", "Add")


def test_fp16_file_gets_fp16_inputs(whole: Path, tmp_path: Path) -> None:
    def halved(graph: onnx.GraphProto) -> None:
        transposed(4)(graph)
        for tensor in graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16

    found = find(whole, changed(whole, tmp_path, halved), 0.02)
    assert found is not None
    assert found.node == "product4"


def test_weights_outside_the_file_are_not_read_into_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    outside = changed(whole, tmp_path, transposed(17), **how)
    assert outside.stat().st_size < (tmp_path / "weights").stat().st_size
    monkeypatch.chdir("/")
    graph = Graph(outside)
    assert not any(tensor.raw_data for tensor in graph.weights.values())
    found = find(whole, outside)
    assert found is not None
    assert found.node == "product17"


def test_branch_with_its_captured_tensors_is_one_node(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info

    def model(path: Path, factor: float) -> Path:
        branches = {}
        for word, kind in (("then_branch", "Mul"), ("else_branch", "Add")):
            inner = helper.make_node(kind, ["outside", "factor"], [word])
            branches[word] = helper.make_graph([inner], word, [], [value(word, TensorProto.FLOAT, None)])
        nodes = [
            helper.make_node("Abs", ["x"], ["outside"], name="abs"),
            helper.make_node("ReduceMax", ["outside"], ["most"], name="most", keepdims=0),
            helper.make_node("Cast", ["most"], ["any"], name="any", to=TensorProto.BOOL),
            helper.make_node("If", ["any"], ["y"], name="choice", **branches),
        ]
        given, answered = ([value(name, TensorProto.FLOAT, ["batch", 8])] for name in ("x", "y"))
        weights = [numpy_helper.from_array(np.array(factor, np.float32), "factor")]
        graph = helper.make_graph(nodes, "branch", given, answered, weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        return path

    found = find(model(tmp_path / "left.onnx", 2.0), model(tmp_path / "right.onnx", 3.0))
    assert found is not None
    assert (found.node, found.op) == ("choice", "If")


def test_other_shapes_and_nan_are_wrong(whole: Path, tmp_path: Path) -> None:
    def summed(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "before"
        graph.node.append(helper.make_node("ReduceSum", ["before"], ["y"], name="total", keepdims=0))
        graph.output[0].type.tensor_type.ClearField("shape")

    found = find(whole, changed(whole, tmp_path, summed))
    assert found is not None
    assert (found.node, found.op) == ("total", "ReduceSum")

    def rootless(graph: onnx.GraphProto) -> None:
        next(node for node in graph.node if node.name == "bend8").op_type = "Sqrt"

    found = find(whole, changed(whole, tmp_path, rootless))
    assert found is not None
    assert (found.node, found.error) == ("bend8", float(np.finfo(np.float64).max))


def test_recorded_values_replace_a_reference_file(whole: Path, tmp_path: Path) -> None:
    names = [f"h{layer}" for layer in range(LAYERS - 1)] + ["y"]  # as in a trace whose inner nodes have other names
    values = Graph(whole).run(FEED, names)
    assert find_first_wrong_by_values(values, whole, FEED, 1e-4, 1e-4) is None
    found = find_first_wrong_by_values(values, changed(whole, tmp_path, transposed(5)), FEED, 1e-4, 1e-4)
    assert found is not None
    assert (found.node, found.op) == ("sum5", "Add"), "the inner steps of layer 5 are not known"
    assert str(found).startswith("the first node that is wrong is `sum5` (Add), off by ")


class Sneaky(nn.Module):
    """A module that behaves differently while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_compiling() else x * 1.5


def layers(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, 3))


def damaged(made: Exported, name: str) -> str:
    """The explanation for a file with one weight transposed and half of it lost."""
    model = onnx.load(made.path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(name))
    values = numpy_helper.to_array(tensor).copy()
    values[: len(values) // 2] = 0
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, made.path)
    return explain_difference(made.written, made.path, made.kind.fault_feeds(), made.config)


def test_damaged_weight_is_reported_by_node_and_module(exported: Exporter) -> None:
    made = exported(Small(layers(nn.ReLU()), pairs()))
    assert explain_difference(made.written, made.path, made.kind.fault_feeds(), made.config) == ""
    output = damaged(made, "3.weight")
    assert output.startswith("the first node that is wrong is `node_")
    assert "(Gemm), off by" in output
    assert output.endswith("of `3` (Linear)"), output
    assert damaged(made, "0.weight").endswith("of `0` (Linear)"), "of two faults the earlier"


class Bent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def test_missing_operator_of_forward_is_reported_with_its_line(exported: Exporter) -> None:
    made = exported(Small(layers(Bent()), pairs()))
    model = onnx.load(made.path)
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Identity"
    onnx.save(model, made.path)
    cause = explain_difference(made.written, made.path, made.kind.fault_feeds(), made.config)
    assert re.search(r"\(Identity\), off by .* of `2` \(Bent\), test_fault_search\.py line \d+$", cause), cause


def test_module_that_is_traced_differently_is_named(tmp_path: Any) -> None:
    task: Any = Small(layers(Sneaky()), pairs())
    report = write_and_compare(open_model(task, tmp_path / "model.onnx"))
    with pytest.raises(StageError, match=r"the trace is not the model: it answers otherwise in `2`, off by .* python"):
        report.require(Export())


class Short(nn.Module):
    """Decides by a length, which a trace takes for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 5 else x * 2


def test_length_compared_in_python_is_named(tmp_path: Any) -> None:
    task: Any = Small(layers(Short()), pairs())
    report = write_and_compare(open_model(task, tmp_path / "model.onnx"))
    with pytest.raises(
        StageError, match=r"compares a length in python \(test_fault_search\.py line \d+: `return x if x\."
    ):
        report.require(Export())
    assert np.isfinite([one["max_abs_error"] for one in report.test_set + report.shapes]).all()
