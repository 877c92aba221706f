"""Weights in blocks of integers: the operators of ONNX Runtime compute with the dequantized values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.llm.weight_only import LANGUAGE_CONVERTERS, RoundedBlocks, collect_moments, find_head, gptq, round_blocks
from export.variants.quantize import VariantInputs
from pipeline.system.errors import StageError

Array = np.ndarray[Any, Any]
WORDS, WIDTH, INNER = 50, 64, 96


def restored(rounded: RoundedBlocks, columns: int) -> Array:
    """Return the dequantized matrix."""
    integers, zero = rounded.integers.astype(np.float32), rounded.zero.astype(np.float32)
    return ((integers - zero[..., None]) * rounded.scale[..., None]).reshape(len(integers), -1)[:, :columns]


@pytest.mark.parametrize(("bits", "block", "columns"), [(4, 32, 64), (4, 32, 50), (8, 32, 64), (4, 128, 96)])
def test_rounding_is_off_by_half_a_step_at_most(bits: int, block: int, columns: int) -> None:
    matrix = np.random.default_rng(0).normal(1.0, 2.0, size=(7, columns)).astype(np.float32)
    matrix[3] = 0
    rounded = round_blocks(matrix, bits, block)
    steps = np.repeat(rounded.scale, block, axis=1)[:, :columns]
    assert (np.abs(restored(rounded, columns) - matrix) <= steps * 0.501).all()
    assert not restored(rounded, columns)[3].any()


def test_gptq_changes_the_outputs_of_a_layer_less() -> None:
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(90, 90)) * np.exp(-np.arange(90) / 20)
    inputs = (generator.normal(size=(500, 90)) @ mixing).astype(np.float32)
    matrix = generator.normal(size=(16, 90)).astype(np.float32)
    rounded = [round_blocks(matrix, 4, 32), gptq(matrix, inputs.T @ inputs, 4, 32)]
    nearest, compensated = (np.linalg.norm(inputs @ (restored(one, 90) - matrix).T) for one in rounded)
    assert compensated < 0.8 * nearest


def network(folder: Path, tied: bool) -> Path:
    """Write a graph with an embedding, a layer and a head."""
    generator = np.random.default_rng(0)
    shapes = {"table": (WORDS, WIDTH), "up": (WIDTH, INNER), "down": (INNER, WIDTH), "head": (WIDTH, WORDS)}
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if tied:
        del weights["head"]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"], "lookup"),
        helper.make_node("MatMul", ["embedded", "up"], ["wide"], "first"),
        helper.make_node("Relu", ["wide"], ["active"], "relu"),
        helper.make_node("MatMul", ["active", "down"], ["narrow"], "second"),
        *([helper.make_node("Transpose", ["table"], ["head"], "turn", perm=[1, 0])] if tied else []),
        helper.make_node("MatMul", ["narrow", "head"], ["logits"], "last"),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", WORDS])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def answer(path: Path, ids: Array) -> Array:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits: Array = session.run(None, {"ids": ids})[0]
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "limit"), [("int8", 0.02), ("int4", 0.2), ("int4-128", 0.25), ("int4-gptq", 0.2)])
def test_file_with_rounded_weights_answers_nearly_the_same(tmp_path: Path, name: str, limit: float, tied: bool) -> None:
    path, ids = network(tmp_path, tied), np.arange(40).reshape(4, 10)
    (tmp_path / name).mkdir()
    rounded = tmp_path / name / "model.onnx"
    note = LANGUAGE_CONVERTERS[name](
        VariantInputs(path, False, 7, lambda: [{"ids": ids[:1]}, {"ids": ids[1:]}]), rounded
    )
    expected, actual = answer(path, ids), answer(rounded, ids)
    assert np.sqrt(((expected - actual) ** 2).mean()) < limit * expected.std()
    assert ("calibrated on 2 training texts" in note) == (name == "int4-gptq")
    graph = onnx.load(rounded).graph
    assert not [one.name for one in graph.initializer if one.data_type == TensorProto.FLOAT and "scale" not in one.name]
    operators = {node.name: node for node in graph.node}
    bits = {name: next(a.i for a in operators[name].attribute if a.name == "bits") for name in ("first", "last")}
    assert bits == {"first": 8 if name == "int8" else 4, "last": 8}
    shares_table = operators["lookup"].input[0] == operators["last"].input[1]
    assert shares_table == tied


def mixture(folder: Path) -> Path:
    """Write a graph whose loop multiplies by one expert after the other, as `grouped_mm` is exported."""
    stack = np.random.default_rng(0).normal(size=(2, WIDTH, INNER)).astype(np.float32)
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["stack", "index"], ["weight"], "expert"),
            helper.make_node("MatMul", ["hidden", "weight"], ["product"], "product"),
            helper.make_node("Add", ["sum", "product"], ["sum_out"], "add"),
            helper.make_node("Identity", ["continues"], ["continues_out"], "continue"),
        ],
        "body",
        [
            helper.make_tensor_value_info("index", TensorProto.INT64, []),
            helper.make_tensor_value_info("continues", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("continues_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", TensorProto.FLOAT, None),
        ],
    )
    path = network(folder, tied=True)
    model = onnx.load(path)
    nodes = {node.name: node for node in model.graph.node}
    nodes["first"].input[1], nodes["first"].output[0] = "square", "hidden"
    loop = helper.make_node("Loop", ["count", "", "start"], ["wide"], "loop", body=body)
    model.graph.node.insert(2, loop)
    square = np.eye(WIDTH, dtype=np.float32)
    constants = {"stack": stack, "square": square, "count": np.array(2), "start": np.zeros((), np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("name", "share", "limit"), [("int8", 0.3, 0.02), ("int4", 0.2, 0.2)])
def test_experts_that_a_loop_reads_are_rounded(tmp_path: Path, name: str, share: float, limit: float) -> None:
    path, ids = mixture(tmp_path), np.arange(40).reshape(4, 10)
    (tmp_path / name).mkdir()
    rounded = tmp_path / name / "model.onnx"
    LANGUAGE_CONVERTERS[name](VariantInputs(path, False, 7, list), rounded)
    expected, actual = answer(path, ids), answer(rounded, ids)
    assert np.sqrt(((expected - actual) ** 2).mean()) < limit * expected.std()
    sizes = {one.name: len(one.raw_data) for file in (path, rounded) for one in onnx.load(file).graph.initializer}
    assert sum(size for tensor, size in sizes.items() if tensor.startswith("stack.")) < share * sizes["stack"]


def test_moments_are_those_of_the_layers_inputs(tmp_path: Path) -> None:
    path, ids = network(tmp_path, tied=True), np.array([[3, 5, 8]])
    table = next(numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer if one.name == "table")
    assert find_head(onnx.load(path).graph) == "last"
    moments = collect_moments(path, [{"ids": ids}, {"ids": ids + 1}])
    assert moments.keys() == {"embedded", "active"}
    rows = table[[3, 5, 8, 4, 6, 9]]
    assert moments["embedded"] == pytest.approx(rows.T @ rows, rel=1e-4, abs=1e-4)


def test_graph_without_constant_products_is_refused(tmp_path: Path) -> None:
    path = network(tmp_path, tied=False)
    model = onnx.load(path)
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "logits"
    onnx.save(model, path)
    with pytest.raises(StageError, match="nothing to quantize"):
        LANGUAGE_CONVERTERS["int4"](VariantInputs(path, False, 7, list), tmp_path / "rounded.onnx")
