from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from pipeline.contract.signature import NUMPY_TYPES, Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.protocol.tensors import InferRequest, RequestedOutput, Tensor, reject_parameters, to_raw


def _signature(datatype: Any, allows_missing: bool = False) -> Signature:
    spec = TensorSpec(name="x", datatype=datatype, shape=("batch", 2), allows_missing=allows_missing)
    limits, runtime = Limits(max_batch_size=9, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    return Signature(inputs=(spec,), outputs=(spec,), codec="C", limits=limits, runtime=runtime)


def _array(
    datatype: str, data: list[Any] | bytes | memoryview, shape: tuple[int, ...] = (1, 2)
) -> np.ndarray[Any, Any]:
    return InferRequest("", [Tensor("x", datatype, shape, data)], []).arrays(_signature(datatype))["x"]


@pytest.mark.parametrize(
    ("datatype", "data", "sentence"),
    [
        ("FP32", ["1.5", "2"], "x: data holds values that are not FP32"),
        ("FP32", [True, False], "x: data holds values that are not FP32"),
        ("FP32", [0.5, True], "x: data holds values that are not FP32"),
        ("FP32", [[0.5, False]], "x: data holds values that are not FP32"),
        ("INT64", [1, True], "x: data holds values that are not INT64"),
        ("BOOL", [True, 1], "x: data holds values that are not BOOL"),
        ("FP32", [None, 1], "x: data holds null, but the model was trained without missing numbers here"),
        ("FP32", [[1.5, None]], "x: data holds null, but the model was trained without missing numbers here"),
        ("INT64", [None, 1], "x: data holds values that are not INT64"),
        ("BOOL", [None, True], "x: data holds values that are not BOOL"),
        ("BYTES", [None, "a"], "x: data holds values that are not strings"),
        ("FP32", [{}, {}], "x: data holds values that are not FP32"),
        ("FP32", [[1], [1, 2]], "x: data is not a regular array"),
        ("FP32", [1e39, 0], "x: data holds a number outside the range of FP32"),
        ("FP32", [10**39, 0], "x: data holds a number outside the range of FP32"),
        ("FP32", [10**400, 0], "x: data holds a number outside the range of FP32"),
        ("INT64", [1.0, 2.0], "x: data holds values that are not INT64"),
        ("FP16", [65520, 0], "x: data holds a number outside the range of FP16"),
        ("BF16", [3.4e38, 0], "x: data holds a number outside the range of BF16"),
        ("BF16", b"\0" * 3, "x: 3 raw bytes are not a whole number of BF16 elements"),
        ("INT64", [2**63, 0], "x: data holds a number outside the range of INT64"),
        ("UINT64", [2**63, -1], "x: data holds a number outside the range of UINT64"),
        ("FP32", [[1], 2], "x: data is not a regular array"),
        ("FP32", [[[]], [[1]]], "x: data is not a regular array"),
        ("INT8", [128, 0], "x: data holds a number outside the range of INT8"),
        ("INT8", [-129, 0], "x: data holds a number outside the range of INT8"),
        ("UINT8", [-1, 0], "x: data holds a number outside the range of UINT8"),
        ("BOOL", [1, 0], "x: data holds values that are not BOOL"),
        ("BOOL", b"\2\0", "x: raw BOOL data holds a byte other than 0 and 1"),
        ("BYTES", ["a", 1], "x: data holds values that are not strings"),
        ("BYTES", b"\1\0\0", "x: raw BYTES data ends inside an element"),
        ("BYTES", b"\5\0\0\0abc", "x: raw BYTES data ends inside an element"),
        ("BYTES", b"\1\0\0\0\xff\0\0\0\0", "x: raw BYTES data holds an element that is not UTF-8"),
        ("FP32", b"\0" * 7, "x: 7 raw bytes are not a whole number of FP32 elements"),
        ("FP32", [1, 2, 3], "x: data with 3 elements does not fill the shape [1, 2]"),
        ("FP32", [], "x: data with 0 elements does not fill the shape [1, 2]"),
        ("FP32", [[1], [2]], "x: data nested as [2, 1] does not fill the shape [1, 2]"),
    ],
)
def test_data_must_match_datatype_and_shape(datatype: str, data: list[Any] | bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=f"^{re.escape(sentence)}$"):
        _array(datatype, data)


def test_huge_shape_is_rejected_without_allocating() -> None:
    with pytest.raises(InvalidPayload, match=re.escape("x: shape [1000000000000000, 1000000000000000] does not fit")):
        _array("FP32", [1, 2], (10**15, 10**15))


def test_long_string_does_not_multiply_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload, match="x: data holds values that are not FP32"):
            _array("FP32", ["a" * 100_000, *[""] * 10_000])
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
def test_raw_bytes_are_copied_only_for_alignment(datatype: str) -> None:
    raw = to_raw(np.array([[1, 0]], NUMPY_TYPES[datatype]), datatype)
    for shift in range(8):
        room = memoryview(b"x" * shift + raw)
        found = _array(datatype, room[shift:])
        assert found.flags.aligned
        assert found.tolist() == [[1, 0]]
        if datatype == "FP32" and shift in (0, 4):
            assert np.shares_memory(found, np.frombuffer(room, np.uint8))


def test_nan_and_infinity_are_accepted_raw() -> None:
    for datatype in ("FP16", "BF16", "FP32", "FP64"):
        sent = np.array([[np.nan, -np.inf]], NUMPY_TYPES[datatype])
        np.testing.assert_array_equal(_array(datatype, to_raw(sent, datatype)), sent)


def test_bf16_numbers_are_rounded_to_nearest() -> None:
    sent = [0.1, 1 + 2**-9]  # the second is halfway between two; ties go to even
    found = _array("BF16", sent)
    assert found.dtype == np.float32
    assert found.tolist() == [[0.10009765625, 1.0]]
    assert _array("BF16", to_raw(found, "BF16")).tolist() == found.tolist()
    assert len(to_raw(found, "BF16")) == 4


def test_inputs_have_the_signatures_order() -> None:
    first, second = (TensorSpec(name=name, datatype="FP32", shape=("batch",)) for name in ("a", "b"))
    limits, runtime = Limits(max_batch_size=9, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(first, second), outputs=(first,), codec="C", limits=limits, runtime=runtime)
    arrays = InferRequest("", [Tensor(name, "FP32", (1,), [1]) for name in ("b", "a")], []).arrays(signature)
    assert list(arrays) == ["a", "b"]


def test_models_without_inputs_and_scalar_tensors() -> None:
    scalar = TensorSpec(name="k", datatype="INT64", shape=())
    limits, runtime = Limits(max_batch_size=9, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    nothing = Signature(inputs=(), outputs=(scalar,), codec="C", limits=limits, runtime=runtime)
    assert InferRequest("", [], []).arrays(nothing) == {}
    one = Signature(inputs=(scalar,), outputs=(scalar,), codec="C", limits=limits, runtime=runtime)
    for data in ([7], to_raw(np.array(7, np.int64), "INT64")):
        found = InferRequest("", [Tensor("k", "INT64", (), data)], []).arrays(one)["k"]
        assert (found.shape, found.item()) == ((), 7)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"classification": 3}, "parameter 'classification' is not supported: it is a parameter of a requested output"),
        ({"shared_memory_region": "r"}, "parameter 'shared_memory_region' is not supported: send the tensor itself"),
        ({"sequence_id": 5}, "parameter 'sequence_id' is not supported: the service keeps no state"),
    ],
)
def test_unsupported_parameters_are_rejected(parameters: Any, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=f"^outputs.0: {sentence}"):
        reject_parameters(parameters, "outputs.0")


def test_neutral_and_unknown_parameters_are_ignored() -> None:
    reject_parameters({"classification": 0, "sequence_id": "", "priority": 2, "mine": "x"}, "outputs.0")


def test_all_outputs_are_returned_by_default() -> None:
    assert InferRequest("", [], [], binary=True).requested_outputs(_signature("FP32")) == [RequestedOutput("x", True)]
    assert InferRequest("", [], [RequestedOutput("x", False)], binary=True).requested_outputs(_signature("FP32")) == [
        RequestedOutput("x", False)
    ]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("data", [[1.5, None], [[1.5, None]]])
def test_null_is_a_missing_number_where_the_signature_allows_it(datatype: str, data: list[Any]) -> None:
    request = InferRequest("", [Tensor("x", datatype, (1, 2), data)], [])
    found = request.arrays(_signature(datatype, allows_missing=True))["x"]
    assert found.dtype == NUMPY_TYPES[datatype]
    np.testing.assert_array_equal(found, [[1.5, np.nan]])
    raw = to_raw(found, datatype)
    for allows_missing in (True, False):  # raw data carry it as they are
        request = InferRequest("", [Tensor("x", datatype, (1, 2), raw)], [])
        np.testing.assert_array_equal(request.arrays(_signature(datatype, allows_missing))["x"], found)


@pytest.mark.parametrize("data", [[None, "1"], [None, True], [[None], [1, 2]], [None, 1e39]])
def test_what_is_beside_a_missing_number_is_checked(data: list[Any]) -> None:
    with pytest.raises(InvalidPayload):
        InferRequest("", [Tensor("x", "FP32", (1, 2), data)], []).arrays(_signature("FP32", allows_missing=True))
