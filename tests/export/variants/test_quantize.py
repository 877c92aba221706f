"""Training samples that a quantizer cannot use are reported with the reason.

The files that each converter writes, and the models that it refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.conversion.optimize import check_file
from export.conversion.to_onnx import tensor_specs
from export.variants.judge import output_scale
from export.variants.quantize import (
    CONVERTERS,
    VariantInputs,
    calibration_feeds,
    operators_without_fp16,
    sort_nodes,
    static_operators,
)
from pipeline.contract.signature import TensorSpec
from pipeline.system.errors import DataError, StageError

from .net import CLASSES, INNER, WIDE, Array, Hills, graph, write

SPECS = (TensorSpec(name="x", datatype="FP32", shape=("batch", WIDE)),)


def columns(x: Array) -> dict[str, Array]:
    return {"x": x, "label": np.zeros(len(x), np.int64)}


def test_samples_are_spread_over_the_split_in_small_batches() -> None:
    x = np.repeat(np.arange(1000, dtype=np.float32)[:, None], WIDE, axis=1)
    feeds = calibration_feeds(Hills(columns(x)), SPECS, 40)
    assert [len(feed["x"]) for feed in feeds] == [16, 16, 8]
    taken = np.concatenate([feed["x"][:, 0] for feed in feeds])
    assert (taken == np.arange(0, 1000, 25)).all()


def test_all_samples_are_taken_where_there_are_no_more() -> None:
    assert (
        sum(len(feed["x"]) for feed in calibration_feeds(Hills(columns(np.ones((20, WIDE), np.float32))), SPECS, 256))
        == 20
    )


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((64, WIDE)), "gives `x` as float64, the model takes float32; make data"),
        (np.ones((64, WIDE), np.uint8), "gives `x` as uint8, the model takes float32"),
        (np.ones((64, 3), np.float32), r"gives `x` of shape \[16, 3\], the model takes \['batch', 16\]"),
        (np.full((64, WIDE), np.nan, np.float32), "has NaN or infinity in `x`, which has no range"),
        (np.ones((0, WIDE), np.float32), r"data\('train'\): the split is empty"),
        (np.ones((9, WIDE), np.float32), "9 training samples are too few to learn ranges from; give 16 at least"),
    ],
)
def test_values_without_a_range_are_reported(x: Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        calibration_feeds(Hills(columns(x)), SPECS, 256)


def test_too_few_requested_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 training samples are too few"):
        calibration_feeds(Hills(), SPECS, 3)


def test_input_that_training_data_lack_is_named() -> None:
    with pytest.raises(DataError, match="no column x, which the task names as an input"):
        calibration_feeds(Hills({"z": np.ones((64, WIDE), np.float32)}), SPECS, 256)


def material(reference: Path, external: bool = False) -> VariantInputs:
    feeds = [{"x": Hills().data("train")["x"]}]
    return VariantInputs(reference, external, 7, lambda: feeds)


def run(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("name", ["fp16", "int8-dynamic", "int8-static"])
def test_variant_is_smaller_and_deterministic(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path / "model.onnx")
    paths = [tmp_path / f"{name}{turn}.onnx" for turn in range(2)]
    for path in paths:
        CONVERTERS[name](material(reference), path)
    check_file(paths[0])
    assert tensor_specs(paths[0]) == tensor_specs(reference)
    assert paths[0].stat().st_size < reference.stat().st_size
    x = Hills().data("test")["x"]
    expected, found = run(reference, x), run(paths[0], x)
    assert 0 < np.sqrt(((found - expected) ** 2).mean()) < 0.05 * output_scale(expected)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert str(tmp_path).encode() not in paths[0].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", *(path.name for path in paths)}


def test_static_weights_have_7_bits_and_a_scale_per_channel(tmp_path: Path) -> None:
    reference = write(tmp_path / "model.onnx")
    message = CONVERTERS["int8-static"](material(reference), tmp_path / "static.onnx")
    assert message == "ranges from 256 rows of training samples"
    tensors = {one.name: numpy_helper.to_array(one) for one in onnx.load(tmp_path / "static.onnx").graph.initializer}
    weights = [array for array in tensors.values() if array.dtype == np.int8 and array.ndim == 2]
    assert len(weights) == 2
    assert all(32 < np.abs(array.astype(int)).max() <= 64 for array in weights)
    scales = {array.shape for name, array in tensors.items() if name.startswith("weight") and name.endswith("scale")}
    assert {(INNER,), (CLASSES,)} <= scales


def test_static_outputs_beyond_calibration_are_not_clipped(tmp_path: Path) -> None:
    reference = write(tmp_path / "model.onnx")
    CONVERTERS["int8-static"](material(reference), tmp_path / "static.onnx")
    seen = Hills().data("train")["x"]
    far = seen[np.argmax(run(reference, seen).max(axis=1))][None] * 1.2
    assert run(tmp_path / "static.onnx", far).max() > run(tmp_path / "static.onnx", seen).max()


@pytest.mark.parametrize("name", ["fp16", "int8-dynamic", "int8-static"])
def test_weights_that_lay_outside_the_file_stay_outside(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path / "reference" / "model.onnx", external=True)
    path = tmp_path / "other" / "model.onnx"
    path.parent.mkdir()
    CONVERTERS[name](material(reference, external=True), path)
    check_file(path)
    x = Hills().data("test")["x"]
    assert np.abs(run(path, x) - run(reference, x)).mean() < 0.02


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp16", "no fp32 weights: there is nothing to convert"),
        ("int8-dynamic", "no matrix product, embedding or LSTM with constant weights: there is nothing to quantize"),
        ("int8-static", "no convolution, matrix product or embedding with constant weights: there is nothing"),
    ],
)
def test_model_without_weights_is_refused(name: str, message: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Sin", ["x"], ["y"])]
    reference = graph(tmp_path / "model.onnx", nodes, [], WIDE, WIDE)
    with pytest.raises(StageError, match=message):
        CONVERTERS[name](material(reference), tmp_path / "made.onnx")
    assert not (tmp_path / "made.onnx").exists()


def test_weight_beyond_half_precision_is_named_and_not_clamped(tmp_path: Path) -> None:
    reference = write(tmp_path / "model.onnx")
    model = onnx.load(reference)
    huge = numpy_helper.to_array(model.graph.initializer[2]).copy()
    huge[0, 0] = -70000
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(huge, "weight2"))
    onnx.save(model, reference)
    with pytest.raises(StageError, match="weight2 goes beyond 65504, the largest number that fp16 has"):
        CONVERTERS["fp16"](material(reference), tmp_path / "made.onnx")


def test_lowest_float_of_a_mask_becomes_the_lowest_half(tmp_path: Path) -> None:
    lowest = numpy_helper.from_array(np.array(np.finfo(np.float32).min), "lowest")
    nodes = [
        helper.make_node("Less", ["x", "zero"], ["hidden"]),
        helper.make_node("Where", ["hidden", "lowest", "x"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["y"]),
    ]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    reference = graph(tmp_path / "model.onnx", nodes, [lowest, zero], WIDE, WIDE)
    CONVERTERS["fp16"](material(reference), tmp_path / "made.onnx")
    x = Hills().data("test")["x"]
    assert np.allclose(run(tmp_path / "made.onnx", x), run(reference, x), atol=0.002)


def test_angles_and_counts_above_2048_are_not_rounded_to_fp16(tmp_path: Path) -> None:
    """Such as the rotary positions of a decoder, and the number of tokens of each expert by `torch.histc`."""
    edge = np.nextafter(np.float32(3), np.float32(4))
    constants = {"edge": edge, "weight": np.eye(WIDE, dtype=np.float32), "three": np.float32(3)}
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Cast", ["whole"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Cos", ["number"], ["angle"], "angle"),
        helper.make_node("Min", ["number", "three"], ["expert"]),
        helper.make_node("Less", ["expert", "edge"], ["below"], "below"),
        helper.make_node("Cast", ["below"], ["counted"], "counted", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["counted", "number"], ["many"], "many"),
        helper.make_node("Cast", ["many"], ["count"], to=TensorProto.INT64),
        helper.make_node("Cast", ["count"], ["exact"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["exact", "number"], ["lost"]),
        helper.make_node("Add", ["angle", "lost"], ["sum"]),
        helper.make_node("MatMul", ["sum", "weight"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    reference = graph(tmp_path / "model.onnx", nodes, tensors, WIDE, WIDE)
    CONVERTERS["fp16"](material(reference), tmp_path / "made.onnx")
    x = np.arange(4001, 4001 + 2 * WIDE, dtype=np.float32).reshape(2, WIDE)
    assert np.allclose(run(tmp_path / "made.onnx", x), run(reference, x), atol=0.002)


def test_operator_without_fp16_support_stays_fp32_and_is_reported(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["whole", "scale", "zero"], name="rounding"),
        helper.make_node("DequantizeLinear", ["whole", "scale", "zero"], ["rounded"]),
        helper.make_node("MatMul", ["rounded", "weight"], ["y"]),
    ]
    weight = numpy_helper.from_array(np.eye(WIDE, 4, dtype=np.float32), "weight")
    reference = graph(tmp_path / "model.onnx", nodes, [weight], WIDE, 4)
    assert operators_without_fp16(onnx.load(reference)) == {"DynamicQuantizeLinear"}
    message = CONVERTERS["fp16"](material(reference), tmp_path / "made.onnx")
    assert message == "in fp32, for want of a form in fp16: DynamicQuantizeLinear"
    check_file(tmp_path / "made.onnx")
    kinds = {one.name: one.data_type for one in onnx.load(tmp_path / "made.onnx").graph.initializer}
    assert kinds["weight"] == TensorProto.FLOAT16
    x = Hills().data("test")["x"]
    assert np.allclose(run(tmp_path / "made.onnx", x), run(reference, x), atol=0.05)  # a step of the rounding


def test_tensors_captured_by_a_branch_are_sorted_before_it(tmp_path: Path) -> None:
    answer = helper.make_tensor_value_info("taken", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Neg", ["outside"], ["taken"])], "body", [], [answer])
    nodes = [
        helper.make_node("If", ["always"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("MatMul", ["x", "weight"], ["outside"]),
    ]
    tensors = [
        numpy_helper.from_array(np.eye(WIDE, 4, dtype=np.float32), "weight"),
        numpy_helper.from_array(np.array(True), "always"),
    ]
    path = graph(tmp_path / "model.onnx", nodes, tensors, WIDE, 4)
    model = onnx.load(path)
    sort_nodes(model.graph)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "If"]
    onnx.save(model, path)
    check_file(path)


def test_additions_are_quantized_only_beside_convolutions(tmp_path: Path) -> None:
    reference = write(tmp_path / "model.onnx")
    assert "Add" not in static_operators(onnx.load(reference))
    nodes = [helper.make_node("Conv", ["x", "weight"], ["y"])]
    weight = numpy_helper.from_array(np.ones((1, WIDE, 1), np.float32), "weight")
    assert "Add" in static_operators(onnx.load(graph(tmp_path / "conv.onnx", nodes, [weight], WIDE, 1)))
