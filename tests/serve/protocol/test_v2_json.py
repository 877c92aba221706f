"""V2 requests in JSON: the fast and the slow parser accept and return the same; nesting is limited."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import simdjson
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.system.errors import InvalidPayload
from serve.protocol import v2_json
from serve.protocol.v2 import Payload, parse
from serve.protocol.v2_json import JsonRequest, read_v2_json, validate_fields
from serve.request_body import MAX_DEPTH, json_depth, parse_object
from tests.serve.protocol.test_tensors import _signature
from tests.serve.wire.http1.test_floods import counted_calls

INPUT = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 0.1, -2e3]}


def _body(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def test_flat_numbers_become_arrays() -> None:
    others: list[dict[str, Any]] = [
        {"name": "k", "shape": [1], "datatype": "INT8", "data": [5], "parameters": {"a": True, "b": "é"}},
        {"name": "u", "shape": [1], "datatype": "UINT64", "data": [2**64 - 1]},
        {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "f", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    body = _body(INPUT, *others, id="7", outputs=[{"name": "y"}], parameters={"binary_data_output": False})
    found = v2_json.read_flat_json(body)
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
def test_other_or_invalid_bodies_are_left_to_the_slow_parser(body: bytes) -> None:
    assert v2_json.read_flat_json(body) is None


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
    assert len(body) > v2_json.FLAT_JSON_MIN_BYTES
    with pytest.raises(InvalidPayload, match=sentence):
        parse(body, None).arrays(_signature(changes.get("datatype", "FP32")))


@pytest.mark.parametrize(
    ("data", "flat"),
    [([0.25, -1e-07] * 4000, True), ([[0.25, 1.5]] * 4000, False), ([True] * 8000, False), (["1"] * 8000, False)],
)
def test_only_long_flat_bodies_need_no_thread(data: list[Any], flat: bool) -> None:
    body = _body({**INPUT, "data": data})
    assert len(body) > 32 << 10
    assert v2_json.is_flat_json(body) is flat
    assert Payload("tiny", body, None, None).is_quick is flat
    assert not Payload("tiny", body * 8, None, None).is_quick
    assert Payload("tiny", body * 8, "512", None).is_quick  # raw tensors after a little JSON


def test_long_data_keeps_exact_numbers() -> None:
    data = np.random.default_rng(3).normal(size=4000).tolist()
    body = _body({**INPUT, "shape": [1, 4000], "data": data})
    (tensor,) = parse(body, None).inputs
    assert isinstance(tensor.data, np.ndarray)
    assert tensor.data.tolist() == data


def test_parsers_agree_on_mutated_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-", b".", b"e", b"9" * 15, b"true", b"null", b" "]
    tokens += [b'"inputs"', b'"data"', b'"FP32"', b'"INT8"', b'"x"', b"\\", b"\xff", b"\0", b"1.0", b"[1]"]
    two = {**INPUT, "shape": [1, 2]}
    body = _body({**two, "data": [10, -0.25]}, {**two, "name": "k", "datatype": "INT8", "data": [10, 2]}, id="7")
    random, read = np.random.default_rng(11), 0
    for _ in range(1000):
        place, most = int(random.integers(len(body))), int(random.integers(4))
        changed = body[:place] + tokens[int(random.integers(len(tokens)))] + body[place + most :]
        monkeypatch.setattr(v2_json, "FLAT_JSON_MIN_BYTES", 0)
        fast = _parse_result(changed)
        monkeypatch.setattr(v2_json, "FLAT_JSON_MIN_BYTES", 10**9)
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
_DECODER = msgspec.json.Decoder(JsonRequest)


def _without_empty(form: JsonRequest) -> Any:
    """Drop null and empty values, which are equivalent."""
    found = msgspec.to_builtins(form)
    for part in ("inputs", "outputs"):
        found[part] = [{key: one[key] for key in one if one[key] not in (None, {})} for one in found[part] or ()]
    return {key: value for key, value in found.items() if value not in (None, {}, [], "")}


@settings(max_examples=200, deadline=None)
@given(_BODIES)
def test_parsers_agree_on_generated_bodies(body: Any) -> None:
    text = msgspec.json.encode(body)
    try:
        fast = _DECODER.decode(text)
    except ValueError:
        fast = None
    try:
        slow = validate_fields(orjson.loads(text))
    except (InvalidPayload, ValueError):
        slow = None
    if fast is None:
        assert slow is None or any(
            value is None for value in _all(body)
        )  # only the slow parser accepts null everywhere
    else:
        assert slow is not None
        assert _numbers(_without_empty(fast)) == _numbers(_without_empty(slow))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"[]", "body: must be a JSON object"),
        (b"{}", "inputs: is missing"),
        (b'{"inputs": {}}', "inputs: must be a list"),
        (b'{"inputs": [1]}', "inputs.0: must be a JSON object"),
        (b'{"inputs": [{"name": 1}]}', "inputs.0.name: must be a string"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [true]}]}', "inputs.0.shape: must hold integers"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1.0]}]}', "inputs.0.shape: must hold integers"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}', "inputs.0.shape: must hold integers"),
        (b'{"inputs": [], "more": 1}', 'unknown field "more"'),
        (b'{"inputs": [], "parameters": {"a": []}}', "parameters: must be a JSON object"),
        (b'{"inputs": [' + b"[" * 5000 + b"]" * 5000 + b"]}", "64 levels deep"),
        (b'{"inputs": [{"name": "\xff"}]}', "not valid JSON"),
    ],
)
def test_invalid_request_is_rejected_with_its_field(text: bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        read_v2_json(text)


INPUT_TEXT = '{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}'


@pytest.mark.parametrize("padding", [0, v2_json.FLAT_JSON_MIN_BYTES])
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
        ("id", '"id": "a:b", "id": "c", "inputs": [INPUT], "model_name": null, "outputs": null, "e": 1'),
    ],
)
def test_name_that_is_given_twice_is_refused(name: str, fields: str, padding: int) -> None:
    with pytest.raises(InvalidPayload, match=f'body: an object has the name "{name}" twice'):
        read_v2_json(f"{{{fields}{' ' * padding}}}".replace("INPUT", INPUT_TEXT).encode())


@pytest.mark.parametrize("padding", [0, v2_json.FLAT_JSON_MIN_BYTES])
def test_colons_in_strings_are_no_names(padding: int) -> None:
    text = (
        '{"id": "a:b", "inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["12:30"]}], "outputs": null'
    )
    request = read_v2_json(f"{text}{' ' * padding}}}".encode())
    assert (request.id, request.inputs[0].data) == ("a:b", ["12:30"])


def _all(value: Any) -> list[Any]:
    """Return all nested values."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for one in inner for found in _all(one))]


def _numbers(value: Any) -> Any:
    """Convert integers beyond 64 bits to floats, as only one of the parsers does."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if type(value) is int and not -(2**63) <= value < 2**64 else value


def nested(depth: int, value: Any = 1) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0),
        (b"5", 0),
        (b"[]", 1),
        (b'{"a": [1, [2], {"b": 3}], "c": []}', 3),
        (b'{"[[[[": "{{{{", "a": []}', 2),
        (rb'["\"[[[\"", "\\", [1], "\\\"{"]', 2),
        (b'["[[[ never closed', 1),
        (b"]]]][[", 0),
    ],
)
def test_depth_ignores_brackets_in_strings(text: bytes, depth: int) -> None:
    assert json_depth(text) == depth


def test_depth_limit_is_exact() -> None:
    deepest = {"a": nested(MAX_DEPTH - 1)}
    assert parse_object(json.dumps(deepest).encode()) == deepest
    with pytest.raises(InvalidPayload, match="more than 64 levels deep"):
        parse_object(json.dumps({"a": nested(MAX_DEPTH)}).encode())


def test_many_shallow_lists_are_accepted() -> None:
    wide = {"instances": [[[1, 2], [3, 4]]] * 500, "text": "[" * 500}
    assert parse_object(memoryview(json.dumps(wide).encode())) == wide


class WalkedObject:
    """An object of simdjson that counts the fields it visits: for each look-up all up to the requested one."""

    def __init__(self, value: Any) -> None:
        self._value, self._names, self.walked = value, list(value.keys()), 0

    def __len__(self) -> int:
        return len(self._value)

    def __getitem__(self, name: str) -> Any:
        self.walked += self._names.index(name) + 1
        return self._value[name]

    def keys(self) -> Iterator[str]:
        self.walked += len(self)
        return iter(self._value.keys())

    def items(self) -> Iterator[tuple[str, Any]]:
        self.walked += len(self)
        return iter(self._value.items())


@pytest.mark.parametrize("count", [5, 6, 1000])
def test_work_for_an_object_is_linear_in_its_fields(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {f"k{number}": number for number in range(count)}
    walked = WalkedObject(simdjson.Parser().parse(orjson.dumps(fields)))
    monkeypatch.setattr(simdjson, "Object", WalkedObject)
    with contextlib.suppress(TypeError):  # it is left to the slow parser
        assert v2_json._unique_fields(walked) == fields
    assert walked.walked <= 5 * count


def test_many_fields_are_refused_by_name() -> None:
    body = orjson.dumps({"inputs": [INPUT], **{f"k{number}": number for number in range(20_000)}})
    with pytest.raises(InvalidPayload, match='unknown field "k0"'):
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
        pytest.raises(InvalidPayload, match=r"puts: [0-9]+ in one request; the model has 1|twice"),
    ):
        parse(FLOODS[name], None, signature=signature)
    assert calls[-1] < 2000, "most of them are pytest's"


def test_few_surplus_inputs_are_named() -> None:
    others = [{**INPUT, "name": f"x{number}", "data": [0.5] * 3000} for number in range(3)]
    request = parse(_body(INPUT, *others), None, signature=_signature("FP32"))
    with pytest.raises(InvalidPayload, match="inputs: unknown input 'x0'; the model takes 'x'"):
        request.arrays(_signature("FP32"))


@pytest.mark.parametrize("count", [101, 20_000])
@pytest.mark.parametrize("where", ["parameters", "inputs.0", "outputs.0"])
def test_flood_of_parameters_is_refused(where: str, count: int) -> None:
    many = {"parameters": {f"k{number}": number for number in range(count)}}
    tensor, output = {**INPUT, **(many if where == "inputs.0" else {})}, many if where == "outputs.0" else {}
    body = _body(tensor, outputs=[{"name": "y", **output}], **(many if where == "parameters" else {}))
    with pytest.raises(InvalidPayload, match=f"^{where}: {count} parameters; send at most 100$"):
        parse(body, None)


def test_rejecting_deep_json_takes_no_memory() -> None:
    text = b'{"a": ' + b'{"a":[' * 400 + b" " * 100_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload, match="levels deep"):
            parse_object(text)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * len(text)
    finally:
        tracemalloc.stop()
