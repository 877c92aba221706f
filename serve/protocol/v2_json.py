"""The form of a V2 request in JSON: which fields there are and of which types; a sentence where it is another.

Long flat lists of numbers in a JSON request, read straight into arrays: twice as fast and more as by way of lists.

What is not of this form, or wrong in any way, is left to the plain reader, which has the sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import simdjson

from pipeline.contract.errors import InvalidPayload
from serve.protocol.tensors import Parameters, Tensor
from serve.request_body import check_depth, count_up_to, parse_object

_FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
_INPUT = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT = ("name", "parameters")


class Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One requested output."""

    name: str
    parameters: Parameters | None = None


class Form(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Whatever the client does not say, or says is null, is None."""

    inputs: Sequence[Tensor]
    id: str | None = None
    outputs: Sequence[Output] | None = None
    parameters: Parameters | None = None
    model_name: str | None = None


_DECODER = msgspec.json.Decoder(Form)


def read_v2_json(text: bytes | memoryview) -> Form:
    """Checked while it is parsed; what does not pass is read again, slowly, by who can say what is wrong."""
    if len(text) >= FLAT_JSON_MIN_BYTES:
        return checked(read_flat_json(bytes(text)) or parse_object(text))
    try:
        form = _DECODER.decode(text)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return checked(parse_object(text))
    if any(type(one.data) is list and one.data and type(one.data[0]) is list for one in form.inputs):
        check_depth(text)  # so little text cannot be deep at much cost, and only lists in lists are looked into
    return form


def checked(fields: Mapping[str, Any]) -> Form:
    _check_keys(fields, "body", _FIELDS)
    return Form(
        inputs=[_tensor(one, f"inputs.{index}") for index, one in enumerate(_list(fields, "inputs", ""))],
        id=_text(fields, "id", "", ""),
        outputs=[_output(one, f"outputs.{index}") for index, one in enumerate(_list(fields, "outputs", "", []))],
        parameters=_parameters(fields, "parameters"),
        model_name=_text(fields, "model_name", "", "") or None,
    )


def check_index(fields: Mapping[str, Any]) -> None:
    """What may be said when asking which models there are: that only ready ones are meant, as all of them are."""
    _check_keys(fields, "body", ("ready",))
    flag(fields, "ready", "body", default=True)


def flag(parameters: Parameters, name: str, place: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{place}: {name} must be true or false")
    return value


def _tensor(one: Any, where: str) -> Tensor:
    _check_keys(one, where, _INPUT)
    name, datatype = _text(one, "name", where), _text(one, "datatype", where)
    return Tensor(name, datatype, _shape(one, where), one.get("data"), _parameters(one, f"{where}.parameters"))


def _output(one: Any, where: str) -> Output:
    _check_keys(one, where, _OUTPUT)
    return Output(_text(one, "name", where), _parameters(one, f"{where}.parameters"))


def _check_keys(one: Any, where: str, known: Sequence[str]) -> None:
    if not isinstance(one, dict):
        raise InvalidPayload(f"{where}: must be a JSON object")
    for key in one:
        if key not in known:
            raise InvalidPayload(f'{where}: unknown field "{key[:80]}"; there are {", ".join(known)}')


def _text(one: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = one.get(key)
    value = default if value is None else value  # many a client writes null for what it does not say
    if type(value) is str:
        return value
    place = f"{where}.{key}" if where else key
    raise InvalidPayload(f"{place}: {'is missing' if value is None else 'must be a string'}")


def _list(one: Mapping[str, Any], key: str, where: str, default: list[Any] | None = None) -> list[Any]:
    value = one.get(key)
    value = default if value is None else value
    if type(value) is list:
        return value
    place = f"{where}.{key}" if where else key
    raise InvalidPayload(f"{place}: {'is missing' if value is None else 'must be a list'}")


def _shape(one: Mapping[str, Any], where: str) -> list[int]:
    shape = _list(one, "shape", where)
    for axis in shape:
        if type(axis) is not int or axis < 0:
            raise InvalidPayload(f"{where}.shape: must hold whole numbers from 0 on")
    return shape


def _parameters(one: Mapping[str, Any], where: str) -> Parameters:
    value = one.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, bool | int | float | str) for item in value.values()):
        raise InvalidPayload(f"{where}: must be a JSON object of numbers, texts, true and false")
    return value


FLAT_JSON_MIN_BYTES = 8 << 10  # below it the plain reader is as fast

_SAMPLE_BYTES = 256
_Buffer: TypeAlias = tuple[Literal["d", "i", "u"], type[np.generic]]
_FLOAT: _Buffer = ("d", np.float64)
_BUFFERS: dict[str, _Buffer] = {"FP": _FLOAT, "BF": _FLOAT, "IN": ("i", np.int64), "UI": ("u", np.uint64)}


def is_flat_json(text: bytes) -> bool:
    """Whether the middle of it is numbers one after another."""
    middle = len(text) // 2
    return not text[middle : middle + _SAMPLE_BYTES].translate(None, b"0123456789+-.eE, \t\r\n")


def read_flat_json(text: bytes) -> dict[str, Any] | None:
    """The request's fields, with arrays where the inputs' data are numbers; None where another must read it."""
    try:
        fields = _fields(simdjson.Parser().parse(text))
        inputs = [_fields(one) for one in fields["inputs"]]
        # Each list that is not nested has one bracket, so that a bracket more means a list within one.
        lists = 1 + 2 * len(inputs) + ("outputs" in fields)
        if count_up_to(lists, text, b"[") != lists:
            return None
        found = [{key: _input(key, value, one["datatype"]) for key, value in one.items()} for one in inputs]
    except (ValueError, TypeError, KeyError, RuntimeError):  # all that simdjson raises, and a wrong form
        return None
    return {key: found if key == "inputs" else _plain(value) for key, value in fields.items()}


def _fields(found: Any) -> dict[str, Any]:
    """By name; the parser's own access would take the first of two fields of one name, and all else the last."""
    if not isinstance(found, simdjson.Object) or len(names := list(found.keys())) != len(set(names)):
        raise TypeError
    return {name: found[name] for name in names}


def _input(key: str, value: Any, datatype: Any) -> Any:
    buffer = _BUFFERS.get(str(datatype)[:2])
    if key != "data" or buffer is None or not isinstance(value, simdjson.Array):
        return _plain(value)
    return np.frombuffer(value.as_buffer(of_type=buffer[0]), buffer[1])


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value
