from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.spec.errors import InvalidPayload
from serve.protocol import flatjson
from serve.protocol.v2 import Call, parse

INPUT = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 0.1, -2e3]}


def _body(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def test_numbers_become_arrays_and_everything_else_is_as_the_plain_reader_has_it() -> None:
    others: list[dict[str, Any]] = [
        {"name": "k", "shape": [1], "datatype": "INT8", "data": [5], "parameters": {"a": True, "b": "é"}},
        {"name": "u", "shape": [1], "datatype": "UINT64", "data": [2**64 - 1]},
        {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "f", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    body = _body(INPUT, *others, id="7", outputs=[{"name": "y"}], parameters={"binary_data_output": False})
    found = flatjson.read(body)
    assert found is not None
    arrays = [one["data"] for one in found["inputs"]]
    assert [getattr(data, "dtype", list) for data in arrays] == [np.float64, np.int64, np.uint64, list, list]
    found["inputs"] = [{**one, "data": list(one["data"])} for one in found["inputs"]]
    assert found == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        _body({**INPUT, "data": [[1, 2, 3]]}),
        _body({**INPUT, "data": [1, [2], 3]}),
        _body({**INPUT, "data": [1, [], 3]}),
        _body({**INPUT, "data": [1, True, 3]}),
        _body({**INPUT, "data": [1, None, 3]}),
        _body({**INPUT, "data": [1, "2", 3]}),
        _body({**INPUT, "data": [10**30, 2, 3]}),
        _body({**INPUT, "datatype": "INT64", "data": [1.0]}),
        _body({**INPUT, "datatype": "UINT8", "data": [-1]}),
        _body({**INPUT, "name": "x["}),
        b'{"inputs": [], "inputs": [{}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], "data": [2]}]}',
        b'{"inputs": [1]}',
        b'{"inputs": 1}',
        b'{"inputs": [{}',
        b'{"inputs": []} []',
        b"[]",
        b"{}",
        b"",
        b'{"inputs": [], "id": "\xff"}',
        b'{"inputs": ' + b"[" * 5000,
    ],
)
def test_what_is_of_another_form_or_wrong_is_left_to_the_plain_reader(body: bytes) -> None:
    assert flatjson.read(body) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": [True] * 5000}, "x: data holds values that are not FP32"),
        ({"data": [1, [2]] * 3000}, "x: data is not a regular array"),
        ({"datatype": "INT8", "data": [128] * 5000}, "x: data holds a number outside the range of INT8"),
        ({"datatype": "INT8", "data": [0.5] * 5000}, "x: data holds values that are not INT8"),
    ],
)
def test_long_data_gets_the_same_sentences_as_short(changes: dict[str, Any], sentence: str) -> None:
    from tests.serve.protocol.test_tensors import _signature

    body = _body({**INPUT, **changes, "shape": [1, 2]})
    assert len(body) > flatjson.LEAST_BYTES
    with pytest.raises(InvalidPayload, match=sentence):
        parse(body, None).arrays(_signature(changes.get("datatype", "FP32")))


@pytest.mark.parametrize(
    ("data", "flat"),
    [
        ([0.25, -1e-07] * 4000, True),
        ([[0.25, 1.5]] * 4000, False),
        ([True] * 8000, False),
        (["1"] * 8000, False),
    ],
)
def test_long_bodies_of_numbers_need_no_thread_and_all_others_do(data: list[Any], flat: bool) -> None:
    body = _body({**INPUT, "data": data})
    assert len(body) > 32 << 10
    assert flatjson.likely(body) is flat
    assert Call("tiny", body, None).quick is flat
    assert not Call("tiny", body * 8, None).quick
    assert Call("tiny", body * 8, "512").quick  # raw tensors behind a little JSON


def test_long_data_gives_the_very_numbers_the_plain_reader_gives() -> None:
    data = np.random.default_rng(3).normal(size=4000).tolist()
    body = _body({**INPUT, "shape": [1, 4000], "data": data})
    (tensor,) = parse(body, None).inputs
    assert isinstance(tensor.data, np.ndarray)
    assert tensor.data.tolist() == data


def test_whatever_becomes_of_a_body_both_readers_say_the_same_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-", b".", b"e", b"9" * 15, b"true", b"null", b" "]
    tokens += [b'"inputs"', b'"data"', b'"FP32"', b'"INT8"', b'"x"', b"\\", b"\xff", b"\0", b"1.0", b"[1]"]
    two = {**INPUT, "shape": [1, 2]}
    body = _body({**two, "data": [10, -0.25]}, {**two, "name": "k", "datatype": "INT8", "data": [10, 2]}, id="7")
    random, read = np.random.default_rng(11), 0
    for _ in range(3000):
        place, most = int(random.integers(len(body))), int(random.integers(4))
        changed = body[:place] + tokens[int(random.integers(len(tokens)))] + body[place + most :]
        monkeypatch.setattr(flatjson, "LEAST_BYTES", 0)
        fast = _told(changed)
        monkeypatch.setattr(flatjson, "LEAST_BYTES", 10**9)
        assert fast == _told(changed), changed
        read += isinstance(fast, list)
    assert read > 100


def _told(body: bytes) -> Any:
    """The inputs as they arrive, or the sentence."""
    from tests.serve.protocol.test_tensors import _signature

    try:
        request = parse(body, None)
    except InvalidPayload as error:
        return str(error)
    found: list[Any] = [request.id, request.outputs]
    for tensor in request.inputs:
        alone = request._replace(inputs=[msgspec.structs.replace(tensor, name="x", shape=[1, 2])], outputs=[])
        try:
            found.append(alone.arrays(_signature(tensor.datatype))["x"].tolist())
        except (InvalidPayload, ValueError) as error:  # a signature knows no other datatypes
            found.append(str(error))
    return found
