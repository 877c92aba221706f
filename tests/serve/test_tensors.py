from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import NUMPY_TYPES, Limits, Runtime, Signature, TensorSpec
from serve.tensors import Request, Tensor, Wish, to_raw


def _signature(datatype: Any) -> Signature:
    spec = TensorSpec(name="x", datatype=datatype, shape=("batch", 2))
    limits, runtime = Limits(max_batch_size=9, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    return Signature(inputs=(spec,), outputs=(spec,), codec="C", limits=limits, runtime=runtime)


def _array(datatype: str, data: list[Any] | bytes, shape: tuple[int, ...] = (1, 2)) -> np.ndarray[Any, Any]:
    return Request("", [Tensor("x", datatype, shape, data)], []).arrays(_signature(datatype))["x"]


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name not in ("BYTES", "BOOL")])
def test_every_number_type_survives_both_ways_of_sending(datatype: str) -> None:
    wanted = np.array([[1, 100]], NUMPY_TYPES[datatype])
    for data in (wanted.ravel().tolist(), wanted.tolist(), to_raw(wanted)):
        found = _array(datatype, data)
        assert found.dtype == wanted.dtype
        assert (found == wanted).all()


def test_booleans_and_strings_survive_both_ways_of_sending() -> None:
    assert _array("BOOL", [True, False]).tolist() == _array("BOOL", b"\1\0").tolist() == [[True, False]]
    texts = np.array([["héllo", ""]], np.object_)
    assert _array("BYTES", ["héllo", ""]).tolist() == _array("BYTES", to_raw(texts)).tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("datatype", "data", "sentence"),
    [
        ("FP32", ["1.5", "2"], "x: data holds values that are not FP32"),
        ("FP32", [True, False], "x: data holds values that are not FP32"),
        ("FP32", [None, 1], "x: data holds values that are not FP32"),
        ("FP32", [{}, {}], "x: data holds values that are not FP32"),
        ("FP32", [[1], [1, 2]], "x: data is not a regular array"),
        ("FP32", [1e39, 0], "x: data holds a number outside the range of FP32"),
        ("INT64", [1.0, 2.0], "x: data holds values that are not INT64"),
        ("INT8", [128, 0], "x: data holds a number outside the range of INT8"),
        ("UINT8", [-1, 0], "x: data holds a number outside the range of UINT8"),
        ("BOOL", [1, 0], "x: data holds values that are not BOOL"),
        ("BOOL", b"\2\0", "x: raw BOOL data holds a byte other than 0 and 1"),
        ("BYTES", ["a", 1], "x: data holds values that are not strings"),
        ("BYTES", b"\1\0\0", "x: raw BYTES data ends inside an element"),
        ("BYTES", b"\5\0\0\0abc", "x: raw BYTES data ends inside an element"),
        ("BYTES", b"\1\0\0\0\xff\0\0\0\0", "x: raw BYTES data holds an element that is not UTF-8"),
        ("FP32", b"\0" * 7, "x: 7 raw bytes are no whole number of FP32 elements"),
        ("FP32", [1, 2, 3], "x: data with 3 elements does not fill the shape [1, 2]"),
        ("FP32", [], "x: data with 0 elements does not fill the shape [1, 2]"),
        ("FP32", [[1], [2]], "x: data nested as [2, 1] does not fill the shape [1, 2]"),
    ],
)
def test_data_that_is_not_what_it_claims_is_refused(datatype: str, data: list[Any] | bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=f"^{re.escape(sentence)}$"):
        _array(datatype, data)


def test_a_shape_larger_than_any_memory_is_refused_without_allocating_it() -> None:
    with pytest.raises(InvalidPayload, match="does not fill the shape"):
        _array("FP32", [1, 2], (10**15, 10**15))


def test_another_datatype_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="x: datatype 'FP64' is not the model's FP32"):
        Request("", [Tensor("x", "FP64", (1, 2), [1, 2])], []).arrays(_signature("FP32"))


def test_without_requested_outputs_all_are_sent() -> None:
    assert Request("", [], [], binary=True).wishes(_signature("FP32")) == [Wish("x", True)]
    assert Request("", [], [Wish("x", False)], binary=True).wishes(_signature("FP32")) == [Wish("x", False)]
