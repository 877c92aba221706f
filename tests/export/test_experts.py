"""The loop over experts that were hit, against each row times its own expert's weights."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from torch import nn

from export.experts import GROUPED, grouped_experts, grouped_mm

WIDE, NARROW = 128, 96


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """One of each size would be a test of the sizes: the operator has none of its own."""
    model, tensor = grouped_mm.to_model_proto(), onnx.helper.make_tensor_value_info
    kinds: dict[str, Any] = {
        "rows": (onnx.TensorProto.FLOAT, ["pairs", WIDE]),
        "ends": (onnx.TensorProto.INT32, ["experts"]),
    }
    kinds["weight"] = (onnx.TensorProto.FLOAT, ["experts", WIDE, NARROW])
    for value in model.graph.input:
        value.CopyFrom(tensor(value.name, *kinds[value.name]))
    for value in model.graph.output:
        value.CopyFrom(tensor(value.name, onnx.TensorProto.FLOAT, ["pairs", NARROW]))
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feed(counts: list[int], seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {
        "rows": chance.normal(size=(sum(counts), WIDE)).astype(np.float32),
        "weight": chance.normal(size=(len(counts), WIDE, NARROW)).astype(np.float32),
        "ends": np.cumsum(counts).astype(np.int32),
    }


@pytest.mark.parametrize("counts", [[3, 1, 2], [0, 4, 0, 0, 1], [5], [0, 0, 7], [1, 0, 0]])
def test_every_row_meets_its_own_expert(session: Any, counts: list[int]) -> None:
    given = feed(counts)
    own = np.repeat(np.arange(len(counts)), counts)
    expected = np.einsum("sk,skn->sn", given["rows"], given["weight"][own])
    np.testing.assert_allclose(session.run(None, given)[0], expected, rtol=1e-4, atol=1e-4)


def test_no_row_at_all_still_has_a_width(session: Any) -> None:
    assert session.run(None, feed([0, 0, 0]))[0].shape == (0, NARROW)


def fastest(session: Any, given: dict[str, Any]) -> float:
    """Of many, on this process's own clock: others share the machine."""
    times = []
    for _ in range(30):
        started = time.thread_time()
        session.run(None, given)
        times.append(time.thread_time() - started)
    return min(times)


def test_time_follows_the_experts_that_are_hit_and_not_those_there_are(session: Any) -> None:
    """Two experts' rows among 4 and among 256 of them: a dense form would take 64 times as long."""
    few, many = [2, 0, 2, 0], [2, *[0] * 253, 2, 0]
    fastest(session, feed(few))
    assert fastest(session, feed(many)) < 6 * fastest(session, feed(few))


def test_a_model_is_traced_with_grouped_experts_and_left_as_it_was() -> None:
    class Config:
        def __init__(self, kind: str | None) -> None:
            self._experts_implementation = kind

    class Part(nn.Module):
        def __init__(self, kind: str | None) -> None:
            super().__init__()
            self.config = Config(kind)

    model: Any = nn.Sequential(Part("eager"), Part(None), nn.Linear(2, 2), Part("batched_mm"))
    shared = model[0].config
    model[2].config = shared

    def kinds() -> list[str | None]:
        return [part.config._experts_implementation for part in model]

    with contextlib.suppress(KeyError), grouped_experts(model):
        assert kinds() == [GROUPED, None, GROUPED, GROUPED]
        raise KeyError  # as a model that does not export
    assert kinds() == ["eager", None, "eager", "batched_mm"]
