"""V2 requests in JSON: whether lists are long changes neither what is read nor the errors; nesting is limited."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.system.errors import InvalidPayload
from serve.limits import MAX_SEARCHES
from serve.protocol import v2_json
from serve.protocol.v2 import Payload, parse
from serve.protocol.v2_json import LONG_LIST_BYTES, read_v2_json
from serve.request_body import parse_object
from tests.serve.protocol.test_tensors import _signature
from tests.serve.wire.http1.test_floods import counted_calls

INPUT = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 0.1, -2e3]}


def _body(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


@pytest.mark.parametrize(
    ("datatype", "values", "kind"),
    [
        ("FP32", [1, 0.1, -2e3, 2**53 + 1], np.float64),
        ("BF16", [1.5, 0], np.float64),
        ("INT8", [5, -(2**63)], np.int64),
        ("UINT64", [2**64 - 1, 0], np.uint64),
    ],
)
@pytest.mark.parametrize("frame", [b'"data":%b', b'"data" :\n%b  '])
def test_long_numbers_become_arrays(datatype: str, values: list[float], kind: type, frame: bytes) -> None:
    numbers = frame % json.dumps(values * 5000).encode()
    text = b'{"id": "\\"data", "inputs": [%b, %b]}'
    form = b'{"name": "%b", "shape": [1, %d], "datatype": "%b", %b}'
    found = read_v2_json(text % tuple(form % (name, len(values), datatype.encode(), numbers) for name in (b"x", b"y")))
    for tensor in found.inputs:
        assert callable(tensor.data)
        array = tensor.data()
        assert array.dtype == kind
        assert array.tolist() == np.array(values * 5000, kind).tolist()


@pytest.mark.parametrize(
    "value",
    [[True] * 5000, ["]"] * 5000, [[1, 2]] * 5000, [1] * 5000 + [[2], 3], [10**30] * 5000, [], [None, 0.5] * 5000, 7],
)
def test_long_values_of_other_kinds_are_read_as_they_are(value: Any) -> None:
    tensor = read_v2_json(_body({**INPUT, "data": value}, id="x" * LONG_LIST_BYTES)).inputs[0]
    assert (tensor.data() if callable(tensor.data) else tensor.data) == value


class Counted(bytes):
    """Notes how many bytes a search goes through."""

    searched = 0

    def find(self, part: Any, start: Any = 0, end: Any = None) -> int:
        end = len(self) if end is None else end
        place = super().find(part, start, end)
        Counted.searched += (place if place >= 0 else end) - start + 1
        return place


@pytest.mark.parametrize("part", [b'"data":[', b'"data":[1]', b'"data"', b'"data":[1,2,3,"a",', b'"data" :   '])
def test_search_for_lists_is_linear(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    text, calls = Counted(part * 10_000), [0]
    monkeypatch.setattr(Counted, "searched", 0)
    with counted_calls(calls):
        assert v2_json._cut_lists(text, []) == text
    assert 0 < Counted.searched <= 4 * len(text)
    assert calls[-1] < 20 * MAX_SEARCHES


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": [True] * 5000}, "x: data holds values that are not FP32"),
        ({"data": [1, [2]] * 3000}, "x: data is not a regular array"),
        ({"datatype": "INT8", "data": [128] * 5000}, "x: data holds a number outside the range of INT8"),
        ({"datatype": "INT8", "data": [0.5] * 5000}, "x: data holds values that are not INT8"),
    ],
)
def test_errors_do_not_depend_on_the_length(changes: dict[str, Any], sentence: str) -> None:
    body = _body({**INPUT, **changes, "shape": [1, 2]})
    assert len(body) > LONG_LIST_BYTES
    with pytest.raises(InvalidPayload, match=sentence):
        parse(body, None).arrays(_signature(changes.get("datatype", "FP32")))


def test_only_short_json_needs_no_thread() -> None:
    for count, quick in ((1000, True), (10_000, False)):
        body = _body({**INPUT, "data": [0.25] * count})
        assert Payload("tiny", body, None, None).is_quick is quick
        assert Payload("tiny", body, "512", None).is_quick  # raw tensors after a little JSON


def test_long_data_keeps_exact_numbers() -> None:
    data = np.random.default_rng(3).normal(size=4000).tolist()
    body = _body({**INPUT, "shape": [1, 4000], "data": data})
    (tensor,) = parse(body, None).inputs
    assert tensor.data().tolist() == data


def test_changed_bodies_are_read_the_same_with_and_without_long_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-", b".", b"e", b"9" * 15, b"true", b"null", b" "]
    tokens += [b'"inputs"', b'"data"', b'"FP32"', b'"INT8"', b'"x"', b"\\", b"\xff", b"\0", b"1.0", b"[1]"]
    two = {**INPUT, "shape": [1, 2]}
    body = _body({**two, "data": [10, -0.25]}, {**two, "name": "k", "datatype": "INT8", "data": [10, 2]}, id="7")
    random, read = np.random.default_rng(11), 0
    for _ in range(1000):
        place, most = int(random.integers(len(body))), int(random.integers(4))
        changed = body[:place] + tokens[int(random.integers(len(tokens)))] + body[place + most :]
        monkeypatch.setattr(v2_json, "LONG_LIST_BYTES", 2)
        fast = _parse_result(changed)
        monkeypatch.setattr(v2_json, "LONG_LIST_BYTES", 10**9)
        assert fast == _parse_result(changed), changed
        read += isinstance(fast, list)
    assert read > 30


def _parse_result(body: bytes) -> Any:
    """Return the inputs, or the error."""
    try:
        request = parse(body, None)
    except InvalidPayload as error:
        return str(error)
    found: list[Any] = [request.id, request.outputs]
    for tensor in request.inputs:
        single = request._replace(inputs=[msgspec.structs.replace(tensor, name="x", shape=[1, 2])], outputs=[])
        try:
            found.append(single.arrays(_signature(tensor.datatype))["x"].tolist())
        except (InvalidPayload, ValueError) as error:  # an unknown datatype
            if str(error).startswith("body: "):  # that of a long list is found late
                return str(error)
            found.append(str(error))
    return found


_SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=4)
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
_PARAMETERS = st.none() | st.dictionaries(st.text(max_size=4), _SCALARS, max_size=3) | _SCALARS
_INPUTS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=4) | _SCALARS,
        "datatype": st.sampled_from(["FP32", "INT64", "BYTES"]) | _SCALARS,
        "shape": st.lists(st.integers(-1, 4) | _SCALARS, max_size=3) | _SCALARS,
        "data": _VALUES,
        "parameters": _PARAMETERS,
        "other": _SCALARS,
    },
)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=4) | _SCALARS,
        "inputs": st.lists(_INPUTS | _SCALARS, max_size=3) | _SCALARS,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.text(max_size=3)}) | _SCALARS, max_size=2) | _SCALARS,
        "parameters": _PARAMETERS,
        "model_name": st.text(max_size=4) | _SCALARS,
        "else": _SCALARS,
    },
)


@settings(max_examples=200, deadline=None)
@given(_BODIES)
def test_generated_bodies_are_read_the_same_with_and_without_long_lists(body: Any) -> None:
    text = msgspec.json.encode(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2_json, "LONG_LIST_BYTES", 2)
        cut = _parse_result(text)
    assert cut == _parse_result(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "body: not valid JSON: "),
        (b"[]", "body: expected `object`, got `array`"),
        (b"{}", "body: missing required field `inputs`"),
        (b'{"inputs": {}}', "inputs: expected `array`, got `object`"),
        (b'{"inputs": [1]}', "inputs[0]: expected `object`, got `int`"),
        (b'{"inputs": [{"name": 1}]}', "inputs[0].name: expected `str`, got `int`"),
        (b'{"inputs": [{"name": null}]}', "inputs[0].name: expected `str`, got `null`"),
        (b'{"inputs": [{"name": "x"}]}', "inputs[0]: missing required field `datatype`"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [true]}]}', "inputs[0].shape[0]: expected `int`"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1.0]}]}', "inputs[0].shape[0]: expected `int`"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}', "inputs[0].shape[0]: expected `int` >= 0"),
        (b'{"inputs": [], "more": 1}', "body: contains unknown field `more`"),
        (b'{"inputs": [], "parameters": {"a": []}}', "parameters: expected `bool | int | float | str`, got"),
        (b'{"inputs": [{"data": ' + b"[" * 50_000, "body: lists and objects are nested too deeply"),
        (b'{"inputs": [{"name": "\xff"}]}', "body: not valid JSON: "),
        (b'{"inputs": [], "%b": 1}' % (b"n" * 50_000), "body: contains unknown field `nnn"),
        (_body({**INPUT, "data": [1] * 9000})[:-1] + b", }", "body: not valid JSON: trailing comma in object (byte 27"),
    ],
)
def test_invalid_request_is_rejected_with_its_field(text: bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=f"^{re.escape(sentence)}") as caught:
        read_v2_json(text)
    assert len(str(caught.value)) < 300


INPUT_TEXT = '{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}'
LONG_INPUT_TEXT = INPUT_TEXT.replace("[1]}", f"[1{', 1' * LONG_LIST_BYTES}]}}")


@pytest.mark.parametrize("tensor", [INPUT_TEXT, LONG_INPUT_TEXT], ids=["short", "long"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("id", '"id": "a", "inputs": [INPUT], "id": "b"'),
        ("id", '"\\u0069d": "a", "inputs": [INPUT], "id": "b"'),
        ("inputs", '"inputs": [], "inputs": [INPUT]'),
        ("inputs", '"id": "a:b", "inputs" : [], "inputs": [INPUT]'),
        ("shape", '"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], "shape": [2]}]'),
        ("a", '"inputs": [{"name": "x", "datatype": "FP32", "shape": [0], "parameters": {"a": 1, "a": 1}}]'),
        ("a", '"inputs": [INPUT], "parameters": {"a": 1, "a": 2}'),
        ("name", '"inputs": [INPUT], "outputs": [{"name": "y", "name": "z"}]'),
        ("id", '"id": "a:b", "id": "c", "inputs": [INPUT], "model_name": null, "outputs": null'),
    ],
)
def test_name_that_is_given_twice_is_refused(name: str, fields: str, tensor: str) -> None:
    with pytest.raises(InvalidPayload, match=f'body: an object has the name "{name}" twice'):
        read_v2_json(f"{{{fields}}}".replace("INPUT", tensor).encode())


@pytest.mark.parametrize("padding", [0, LONG_LIST_BYTES])
def test_colons_in_strings_are_no_names(padding: int) -> None:
    text = (
        '{"id": "a:b", "inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["12:30"]}], "outputs": null'
    )
    request = read_v2_json(f"{text}{' ' * padding}}}".encode())
    assert (request.id, request.inputs[0].data) == ("a:b", ["12:30"])


@pytest.mark.parametrize("read", [parse_object, read_v2_json])
@pytest.mark.parametrize("part", [b"[", b'{"a":[', b'{"a":1, "b": '])
def test_deep_json_is_refused(read: Callable[[bytes], Any], part: bytes) -> None:
    with pytest.raises(InvalidPayload, match="body: lists and objects are nested too deeply"):
        read(b'{"inputs": [{"data": %b' % (part * 100_000))


def test_names_of_deep_json_are_counted_as_far_as_python_goes() -> None:
    for depth in (100, 300, 480):
        body = b'{"text": "a:b", "instances": [%b1%b]}' % (b'{"a":[' * depth, b"]}" * depth)
        with contextlib.suppress(InvalidPayload):
            assert parse_object(body) == orjson.loads(body)


def test_many_shallow_lists_are_accepted() -> None:
    wide = {"instances": [[[1, 2], [3, 4]]] * 500, "text": "[" * 500}
    assert parse_object(memoryview(json.dumps(wide).encode())) == wide


def test_many_fields_are_refused_by_name() -> None:
    body = orjson.dumps({"inputs": [INPUT], **{f"k{number}": number for number in range(20_000)}})
    with pytest.raises(InvalidPayload, match="unknown field `k0`"):
        parse(body, None)


FLOODS = {
    "empty inputs": b'{"inputs":[' + b"{}," * 50_000 + b"{}]}",
    "inputs": b'{"inputs":[' + b'{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]},' * 5000 + b"{}]}",
    "empty outputs": b'{"inputs":[],"outputs":[' + b"{}," * 50_000 + b"{}]}",
    "outputs": b'{"inputs":[],"outputs":[' + b'{"name":"x"},' * 5000 + b'{"name":"x"}]}',
    "repeated fields": b'{"inputs":[],"inputs":[' + b"{}," * 50_000 + b"{}]}",
    "numbers": b'{"inputs":[' + b"1," * 50_000 + b"1]}",
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_tensors_is_refused_before_objects_are_made(name: str) -> None:
    signature, calls = _signature("FP32"), [0]
    with (
        counted_calls(calls),
        pytest.raises(InvalidPayload, match=r"puts: [0-9]+ in one request; the model has 1|puts\[[0-9]+\]: "),
    ):
        parse(FLOODS[name], None, signature=signature)
    assert calls[-1] < 10 * MAX_SEARCHES


def test_few_surplus_inputs_are_named() -> None:
    others = [{**INPUT, "name": f"x{number}", "data": [0.5] * 3000} for number in range(3)]
    request = parse(_body(INPUT, *others), None, signature=_signature("FP32"))
    with pytest.raises(InvalidPayload, match="inputs: unknown input 'x0'; the model takes 'x'"):
        request.arrays(_signature("FP32"))


@pytest.mark.parametrize("count", [101, 20_000])
@pytest.mark.parametrize("where", ["parameters", "inputs[0]", "outputs[0]"])
def test_flood_of_parameters_is_refused(where: str, count: int) -> None:
    many = {"parameters": {f"k{number}": number for number in range(count)}}
    tensor, output = {**INPUT, **(many if where == "inputs[0]" else {})}, many if where == "outputs[0]" else {}
    body = _body(tensor, outputs=[{"name": "y", **output}], **(many if where == "parameters" else {}))
    with pytest.raises(InvalidPayload, match=f"^{re.escape(where)}: {count} parameters; send at most 100$"):
        parse(body, None)
