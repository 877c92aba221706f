from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.protocol.tensors import RequestedOutput
from serve.protocol.v2 import parse, raw_request, render

INPUT = {"name": "x", "shape": [1, 2], "datatype": "FP32"}


def _with_raw(fields: dict[str, Any], raw: bytes) -> tuple[bytes, str]:
    head = json.dumps(fields).encode()
    return head + raw, str(len(head))


def test_raw_bytes_are_assigned_to_inputs_in_order() -> None:
    inputs = [
        {**INPUT, "name": "a", "parameters": {"binary_data_size": 3}},
        {**INPUT, "name": "b", "data": [1, 2]},
        {**INPUT, "name": "c", "parameters": {"binary_data_size": 2}},
    ]
    request = parse(*_with_raw({"inputs": inputs}, b"aaacc"))
    assert [tensor.data for tensor in request.inputs] == [b"aaa", [1, 2], b"cc"]


def test_null_equals_a_missing_optional_field() -> None:
    tensor = {**INPUT, "data": [1, 2]}
    nulls = {"id": None, "parameters": None, "outputs": None, "model_name": None}
    request = parse(json.dumps({"inputs": [{**tensor, "parameters": None}], **nulls}).encode(), None, "m")
    assert request == parse(json.dumps({"inputs": [tensor]}).encode(), None, "m")
    for key in ("name", "shape", "datatype", "data"):
        with pytest.raises(InvalidPayload, match=rf"^inputs\[0\]\.{key}: (expected .*, got `null`|is missing)$"):
            parse(json.dumps({"inputs": [{**tensor, key: None}]}).encode(), None)


def test_model_name_must_match_the_url() -> None:
    assert parse(b'{"inputs": [], "model_name": "m"}', None, "m").inputs == []
    with pytest.raises(InvalidPayload, match="model_name: 'n' is not 'm', the model in the URL"):
        parse(b'{"inputs": [], "model_name": "n"}', None, "m")


def test_binary_data_is_chosen_per_output() -> None:
    fields = {
        "inputs": [],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "p"}, {"name": "q", "parameters": {"binary_data": False}}],
    }
    request = parse(json.dumps(fields).encode(), None)
    assert request.outputs == [RequestedOutput("p", True), RequestedOutput("q", False)]
    assert request.binary


def _signature(*inputs: TensorSpec) -> Signature:
    limits, runtime = Limits(max_batch_size=8, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    return Signature(inputs=inputs, outputs=inputs, codec="C", limits=limits, runtime=runtime)


@pytest.mark.parametrize(
    ("datatype", "shape", "body", "values"),
    [
        ("INT16", ("batch", 2), b"\1\0\2\0", [[1, 2]]),
        ("INT16", ("batch", "length"), b"\1\0\2\0", [[1, 2]]),
        ("INT16", (2,), b"\1\0\2\0", [1, 2]),
        ("BF16", ("batch", "length"), b"\x80\x3f", [[1.0]]),
        ("BYTES", ("batch",), "hé".encode(), ["hé"]),
        ("BYTES", ("batch", "length"), b"", [[""]]),
    ],
)
def test_body_without_json_is_the_only_input_as_one_row(
    datatype: Any, shape: tuple[int | str, ...], body: bytes, values: Any
) -> None:
    signature = _signature(TensorSpec(name="x", datatype=datatype, shape=shape))
    request = raw_request(body, signature)
    assert request.arrays(signature)["x"].tolist() == values
    assert request.requested_outputs(signature) == [RequestedOutput("x", True)]


@pytest.mark.parametrize(
    ("shapes", "datatype", "body", "sentence"),
    [
        ([("batch", 2)] * 2, "INT16", b"\0" * 4, "this model has 2"),
        ([("batch", "a", "b")], "INT16", b"\0" * 4, "does not follow from a size"),
        ([("batch", 2)], "INT16", b"\0" * 8, "data with 4 elements does not fill the shape"),
        ([("batch", "a")], "INT16", b"\0" * 3, "3 raw bytes are not a whole number of INT16"),
        ([("batch",)], "BYTES", b"\xff", "the body is not UTF-8"),
        ([("batch", 2)], "BYTES", b"a", "data with 1 elements does not fill the shape"),
    ],
)
def test_body_without_json_that_is_not_one_row_is_rejected(
    shapes: Any, datatype: Any, body: bytes, sentence: str
) -> None:
    specs = [TensorSpec(name=f"x{place}", datatype=datatype, shape=shape) for place, shape in enumerate(shapes)]
    with pytest.raises(InvalidPayload, match=sentence):
        raw_request(body, _signature(*specs)).arrays(_signature(*specs))


def test_answer_is_json_followed_by_raw_tensors() -> None:
    outputs = {"p": np.array([[1.5, 2.5]], np.float32), "q": np.array(["é"], np.object_)}
    requested_outputs, datatypes = (
        [RequestedOutput("p", True), RequestedOutput("q", False)],
        {"p": "FP32", "q": "BYTES"},
    )
    answer = render({"model_name": "tiny", "model_version": "1", "id": "42"}, requested_outputs, outputs, datatypes)
    fields = json.loads(answer.body[: answer.json_bytes])
    assert answer.body[answer.json_bytes :] == outputs["p"].tobytes()
    assert fields == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "42",
        "outputs": [
            {"name": "p", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
            {"name": "q", "shape": [1], "datatype": "BYTES", "data": ["é"]},
        ],
    }
    assert render({"model_name": "tiny"}, requested_outputs[1:], outputs, datatypes).json_bytes is None
