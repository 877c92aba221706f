from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from export.checks.parity import compare_outputs
from export.compare import Comparison, is_different, require_equal
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from .conftest import COUNT, Classes, Exported, Exporter, Small, linear, pairs


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3


class Masked(nn.Module):
    """Returns minus infinity for negative inputs, like masked scores."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, -torch.inf)


def refusal(made: Exported) -> str:
    with pytest.raises(StageError) as caught:
        require_equal(made.test_set_rows(), made.config)
    return str(caught.value)


def compared(expected: list[list[float]], found: list[list[float]], atol: float = 0.01) -> Comparison:
    """Compare hand-made answers of a classifier, repeated for all samples of its data."""
    arrays = [np.array(values * COUNT, np.float32)[:COUNT] for values in (expected, found)]
    task: Any = Classes(nn.Identity(), pairs())
    config = Export(rtol=0.0, atol=atol)
    return compare_outputs(task, Samples("test", pairs()), {"y": arrays[0]}, {"y": arrays[1]}, config, 1, 0.0)


def test_every_batch_size_is_compared_over_the_whole_test_set(exported: Exporter) -> None:
    made = exported(Classes(linear(), pairs()), batch_sizes=(1, 7, 100))
    found = made.test_set_rows()
    assert [one["batch_size"] for one in found] == [1, 7, 100]
    assert all(one["max_abs_error"] < 1e-4 and one["metrics"] == {"ones": 1.0} for one in found)
    require_equal(found, made.config)


def test_every_initializer_that_is_damaged_is_noticed(exported: Exporter) -> None:
    made = exported(Classes(linear(), pairs()))
    whole = made.path.read_bytes()
    names = [t.name for t in onnx.load(made.path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert len(names) >= 4
    for name in names:
        model = onnx.load_from_string(whole)
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values.flat[0] += 5.0
        tensor.CopyFrom(numpy_helper.from_array(values, name))
        made.path.write_bytes(model.SerializeToString())
        if values.size == 1:
            continue  # a batch norm's epsilon
        assert "the ONNX file is not the model" in refusal(made), name


def test_worst_output_and_sample_are_named() -> None:
    task: Any = Small(nn.Identity(), pairs(), outputs=("a", "b"))
    zeros = np.zeros((COUNT, 2), np.float32)
    found = zeros.copy()
    found[17, 1] = 3.0
    one = compare_outputs(
        task, Samples("test", pairs()), {"a": zeros, "b": zeros}, {"a": zeros, "b": found}, Export(), 7, 0.0
    )
    with pytest.raises(StageError, match=r"at batch size 7, 1 elements differ .*worst 3 in `b` of test sample 17"):
        require_equal([asdict(one)], Export())


def test_swapped_outputs_are_noticed(exported: Exporter) -> None:
    made = exported(Small(Two(), pairs(), outputs=("double", "triple")))
    model = onnx.load(made.path)
    for node in model.graph.node:
        node.output[:] = [{"double": "triple", "triple": "double"}.get(name, name) for name in node.output]
    made.path.write_bytes(model.SerializeToString())
    assert "the ONNX file is not the model" in refusal(made)


def test_output_of_another_shape_is_refused() -> None:
    task: Any = Small(nn.Identity(), pairs())
    with pytest.raises(StageError, match=r"returns `y` of shape \(23, 1\), torch \(23, 2\)"):
        compare_outputs(
            task, Samples("test", pairs()), {"y": np.zeros((23, 2))}, {"y": np.zeros((23, 1))}, Export(), 1, 0.0
        )


@pytest.mark.parametrize(("expected", "found"), [(1.0, np.nan), (np.nan, 1.0), (np.nan, np.nan), (1.0, np.inf)])
def test_nan_and_infinity_are_differences(expected: float, found: float) -> None:
    one = compared([[expected, 0.0, 0.0]], [[found, 0.0, 0.0]])
    assert one.beyond_tolerance == COUNT
    assert is_different(asdict(one))


def test_equal_infinities_are_no_error(exported: Exporter) -> None:
    made = exported(Small(Masked(), pairs()))
    found = made.test_set_rows()
    require_equal(found, made.config)
    assert max(one["max_abs_error"] for one in found) < 1e-6


def test_equal_answers_have_no_flips() -> None:
    one = compared([[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]])
    assert (one.flips, one.unexplained_flips, one.max_abs_error, is_different(asdict(one))) == (0, 0, 0.0, False)


def test_flip_within_tolerance_is_explained() -> None:
    one = compared([[0.500, 0.501, 0.0]], [[0.501, 0.500, 0.0]])
    assert (one.flips, one.unexplained_flips, is_different(asdict(one))) == (COUNT, 0, False)


def test_flip_beyond_tolerance_is_not_explained() -> None:
    one = compared([[0.50, 0.51, 0.0], [1.0, 0.0, 0.0]], [[0.53, 0.51, 0.0], [1.0, 0.0, 0.0]])
    assert one.flips == one.unexplained_flips == -(-COUNT // 2)
    assert is_different(asdict(one))


def test_output_beyond_tolerance_is_refused_without_flips() -> None:
    one = compared([[1.0, 0.0, 0.0]], [[2.0, 0.0, 0.0]])
    assert (one.flips, one.unexplained_flips, one.beyond_tolerance) == (0, 0, COUNT)
    assert is_different(asdict(one))


def test_relative_errors_are_of_the_expected_value() -> None:
    assert compared([[100.0, 0.0, 0.0]], [[100.5, 0.0, 0.0]]).max_rel_error == pytest.approx(0.005)
