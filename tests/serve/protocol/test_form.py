"""Two readers of one form: what the quick one takes, the slow one takes alike, and what it refuses gets a sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.spec.errors import InvalidPayload
from serve.protocol.form import Form, checked, read
from serve.protocol.jsonobject import parse_object

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
_DECODER = msgspec.json.Decoder(Form)


def _plainly(form: Form) -> Any:
    """Null, nothing and empty say the same."""
    found = msgspec.to_builtins(form)
    for part in ("inputs", "outputs"):
        found[part] = [{key: one[key] for key in one if one[key] not in (None, {})} for one in found[part] or ()]
    return {key: value for key, value in found.items() if value not in (None, {}, [], "")}


@settings(max_examples=400, deadline=None)
@given(_BODIES)
def test_both_readers_take_the_same_and_read_the_same(body: Any) -> None:
    text = msgspec.json.encode(body)
    try:
        quick = _DECODER.decode(text)
    except ValueError:
        quick = None
    try:
        slow = checked(orjson.loads(text))
    except (InvalidPayload, ValueError):
        slow = None
    if quick is None:
        assert slow is None or any(value is None for value in _all(body))  # a null is more than the quick one knows
    else:
        assert slow is not None
        assert _numbers(_plainly(quick)) == _numbers(_plainly(slow))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"[]", "body: must be a JSON object"),
        (b"{}", "inputs: is missing"),
        (b'{"inputs": {}}', "inputs: must be a list"),
        (b'{"inputs": [1]}', "inputs.0: must be a JSON object"),
        (b'{"inputs": [{"name": 1}]}', "inputs.0.name: must be a string"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [true]}]}', "inputs.0.shape: must hold whole"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1.0]}]}', "inputs.0.shape: must hold whole"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}', "inputs.0.shape: must hold whole"),
        (b'{"inputs": [], "more": 1}', 'unknown field "more"'),
        (b'{"inputs": [], "parameters": {"a": []}}', "parameters: must be a JSON object"),
        (b'{"inputs": [' + b"[" * 5000 + b"]" * 5000 + b"]}", "64 levels deep"),
        (b'{"inputs": [{"name": "\xff"}]}', "not valid JSON"),
    ],
)
def test_what_is_wrong_is_said(text: bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        read(text)


def test_the_last_of_two_fields_of_one_name_counts_in_both() -> None:
    text = b'{"id": "a", "inputs": [], "id": "b"}'
    assert read(text).id == checked(parse_object(text)).id == "b"


def _all(value: Any) -> list[Any]:
    """Every value in it, at whatever depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for one in inner for found in _all(one))]


def _numbers(value: Any) -> Any:
    """Integers beyond 64 bits, which one reader keeps and the other makes floats, as floats."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if type(value) is int and not -(2**63) <= value < 2**64 else value
