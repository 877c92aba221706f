from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.contract.signature import TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.protocol.classification import check_classification, classify, parse_classification

SPEC = TensorSpec(name="y", datatype="FP32", shape=("batch", 4))


def _rows(*rows: list[Any], kind: Any = np.float32) -> Any:
    return np.array(rows, kind)


def test_largest_values_of_each_row_with_their_index() -> None:
    found = classify(_rows([1, 5, 10, 4], [0.1, -2, 1e-8, 0.30]), SPEC, 2)
    assert found.tolist() == [["10.0:2", "5.0:1"], ["0.3:3", "0.1:0"]]


def test_labels_follow_the_index() -> None:
    spec = SPEC.model_copy(update={"labels": ("a", "b:c", "d", "e")})
    assert classify(_rows([1, 5, 10, 4], kind=np.int64), spec, 2).tolist() == [["10:2:d", "5:1:b:c"]]


def test_labels_of_another_axis_are_left_out() -> None:
    spec = SPEC.model_copy(update={"shape": ("batch", 2, 2), "labels": ("a", "b")})
    assert classify(_rows([[1, 5], [10, 4]]), spec, 1).tolist() == [["10.0:2"]]


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ([3, 3, 3], np.float32, ["3.0:0", "3.0:1", "3.0:2"]),
        ([np.nan, -np.inf, 1], np.float32, ["1.0:2", "nan:0", "-inf:1"]),
        ([0, 2**64 - 1, 5], np.uint64, ["18446744073709551615:1", "5:2", "0:0"]),
        ([-128, 127, 0], np.int8, ["127:1", "0:2", "-128:0"]),
    ],
)
def test_equal_extreme_and_missing_values_are_in_order(row: list[Any], kind: Any, expected: list[str]) -> None:
    assert classify(_rows(row, kind=kind), SPEC, 9).tolist() == [expected], "no more than there are"


def test_output_without_batch_is_one_row() -> None:
    assert classify(_rows([1, 2], [4, 3]), TensorSpec(name="y", datatype="FP32", shape=(2, 2)), 2).tolist() == [
        "4.0:2",
        "3.0:3",
    ]
    assert classify(np.array(7, np.int32), TensorSpec(name="y", datatype="INT32", shape=()), 1).tolist() == ["7:0"]


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES"])
def test_output_without_numbers_is_rejected(datatype: Any) -> None:
    with pytest.raises(InvalidPayload, match=f"classification needs numbers, and the output is {datatype}"):
        check_classification(TensorSpec(name="y", datatype=datatype, shape=("batch", 4)))


@pytest.mark.parametrize("value", [True, -1, 1.0, "2", 1001])
def test_other_than_a_number_of_classes_is_rejected(value: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"outputs\.0: classification .* is no whole number of classes"):
        parse_classification(value, "outputs.0")


def test_none_and_zero_request_the_tensor() -> None:
    assert (parse_classification(None, ""), parse_classification(0, "")) == (0, 0)
