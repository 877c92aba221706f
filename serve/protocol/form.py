"""The form of a V2 request in JSON: which fields there are and of which types; a sentence where it is another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.spec.errors import InvalidPayload
from serve.protocol import flatjson
from serve.protocol.jsonobject import check_levels, parse_object
from serve.protocol.tensors import Parameters, Tensor

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


def read(text: bytes | memoryview) -> Form:
    """Checked while it is parsed; what does not pass is read again, slowly, by who can say what is wrong."""
    if len(text) >= flatjson.LEAST_BYTES:
        return checked(flatjson.read(bytes(text)) or parse_object(text))
    try:
        form = _DECODER.decode(text)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return checked(parse_object(text))
    if any(type(one.data) is list and one.data and type(one.data[0]) is list for one in form.inputs):
        check_levels(text)  # so little text cannot be deep at much cost, and only lists in lists are looked into
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
