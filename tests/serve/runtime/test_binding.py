"""On the memory of the CPU, which every machine has; `tests/gpu` has the same on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from serve.runtime import binding


def _pair(first: int, second: int, operators: tuple[str, str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(operators[0], ["a"], ["c"]), helper.make_node(operators[1], ["b"], ["d"])],
        "pair",
        [
            helper.make_tensor_value_info("a", first, ["batch", 3]),
            helper.make_tensor_value_info("b", second, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("c", first, ["batch", 3]),
            helper.make_tensor_value_info("d", second, ["batch"]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _session(path: Path, second: int) -> Any:
    onnx.save(_pair(TensorProto.FLOAT, second, ("Neg", "Identity")), path / "pair.onnx")
    return onnxruntime.InferenceSession(str(path / "pair.onnx"), providers=["CPUExecutionProvider"])


@pytest.fixture
def session(tmp_path: Path) -> Any:
    return _session(tmp_path, TensorProto.INT64)


def test_outputs_come_back_in_the_order_asked_for(session: Any) -> None:
    inputs = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, -8])}
    whole, real = binding.run(session, ["d", "c"], inputs, "cpu")
    assert whole.tolist() == [7, -8]
    np.testing.assert_array_equal(real, -inputs["a"])


def test_one_output_alone(session: Any) -> None:
    found = binding.run(session, ["c"], {"a": np.ones((1, 3), np.float32), "b": np.array([1])}, "cpu")
    assert [array.tolist() for array in found] == [[[-1, -1, -1]]]


def test_an_answer_outlives_its_binding_and_later_runs(session: Any) -> None:
    first = binding.run(session, ["c"], {"a": np.ones((2, 3), np.float32), "b": np.array([1, 1])}, "cpu")[0]
    for value in range(20):
        binding.run(session, ["c"], {"a": np.full((2, 3), value, np.float32), "b": np.array([1, 1])}, "cpu")
    assert (first == -1).all()


def test_threads_do_not_mix_their_tensors(session: Any) -> None:
    def ask(value: int) -> bool:
        inputs = {"a": np.full((value, 3), value, np.float32), "b": np.full(value, value)}
        real, whole = binding.run(session, ["c", "d"], inputs, "cpu")
        return bool((real == -value).all()) and real.shape == (value, 3) and whole.tolist() == [value] * value

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, [1 + number % 9 for number in range(100)]))


def test_a_model_of_texts_is_not_bound(session: Any, tmp_path: Path) -> None:
    assert binding.suits(session)
    assert not binding.suits(_session(tmp_path, TensorProto.STRING))
