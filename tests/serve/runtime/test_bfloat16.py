from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from serve.runtime import bfloat16
from serve.runtime.bfloat16 import from_bits, to_bits


def test_rounding_equals_ml_dtypes() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0x00000001, 0x3F808000, 0x3F818000], np.uint32)
    numbers = np.concatenate([bits, edges]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    wanted = numbers.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_bits(numbers), wanted.view(np.uint16))
    np.testing.assert_array_equal(from_bits(to_bits(numbers)), wanted.astype(np.float32))


def test_nan_stays_nan() -> None:
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(from_bits(to_bits(nans))).all()


def test_bf16_model_runs_with_other_types_and_empty_batches(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    types = {"x": TensorProto.BFLOAT16, "k": TensorProto.INT64}
    shapes: dict[str, list[str | int]] = {"x": ["batch", 2], "k": []}
    inputs = [helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in types.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", kind, shapes[name]) for name, kind in types.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in types]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    path.write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert bfloat16.uses_bfloat16(session)
    for rows in (0, 3):
        x = from_bits(to_bits(np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32)))
        found = bfloat16.run(session, ["k_out", "x_out"], {"x": x, "k": np.array(5)})
        assert (found[0].shape, found[0].item()) == ((), 5)
        assert found[1].dtype == np.float32
        np.testing.assert_array_equal(found[1], x)


def test_invalid_values_of_a_bf16_model_are_reported() -> None:
    """A bound run of ONNX Runtime only reports that it failed."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["rows", 4]),
        helper.make_tensor_value_info("k", TensorProto.INT64, ["batch"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["batch", 4])]
    graph = helper.make_graph([helper.make_node("Gather", ["x", "k"], ["y"])], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.ones((3, 4), np.float32)
    with pytest.raises(InvalidArgument, match="indices element out of data bounds"):
        bfloat16.run(session, ["y"], {"x": x, "k": np.array([3])})
    (found,) = bfloat16.run(session, ["y"], {"x": x, "k": np.array([2, 0])})
    np.testing.assert_array_equal(found, x[:2])
