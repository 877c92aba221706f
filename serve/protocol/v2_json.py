"""V2 requests in JSON: parsing and validation of the fields.

Most requests are decoded by msgspec. Long flat lists of numbers are read straight into arrays by simdjson, which is at
least twice as fast. Whatever fails in these is parsed again slowly, to report what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import simdjson

from pipeline.contract.signature import Signature
from pipeline.system.errors import InvalidPayload
from serve.protocol.tensors import Parameters, Tensor
from serve.protocol.validate import check_counts
from serve.request_body import check_depth, check_names, check_unique, count_up_to, parse_object

T = TypeVar("T")

_FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
_INPUT = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT = ("name", "parameters")

FLAT_JSON_MIN_BYTES = 8 << 10  # with less, orjson is as fast
_SAMPLE_BYTES = 256
_Buffer: TypeAlias = tuple[Literal["d", "i", "u"], type[np.generic]]
_FLOAT: _Buffer = ("d", np.float64)
_BUFFERS: dict[str, _Buffer] = {"FP": _FLOAT, "BF": _FLOAT, "IN": ("i", np.int64), "UI": ("u", np.uint64)}


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One requested output."""

    name: str
    parameters: Parameters | None = None


class JsonRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A request; missing fields and null are None."""

    inputs: Sequence[Tensor]
    id: str | None = None
    outputs: Sequence[JsonOutput] | None = None
    parameters: Parameters | None = None
    model_name: str | None = None


_DECODER = msgspec.json.Decoder(JsonRequest)


def read_v2_json(text: bytes | memoryview, signature: Signature | None = None) -> JsonRequest:
    """Parse and validate a request; the signature limits how many inputs and outputs a long one has."""
    if len(text) >= FLAT_JSON_MIN_BYTES:
        return validate_fields(read_flat_json(bytes(text), signature) or parse_object(text), signature)
    try:
        request = _DECODER.decode(text)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return validate_fields(parse_object(text), signature)
    if any(type(tensor.data) is list and tensor.data and type(tensor.data[0]) is list for tensor in request.inputs):
        check_depth(text)  # only needed for nested lists: msgspec limits everything else by its types
    check_names(bytes(text), _count_names(request))
    return request


def _count_names(request: JsonRequest) -> int:
    """Return how many names the text of a request has that gives no null."""
    values = (request.id, request.outputs, request.parameters, request.model_name)
    count = 1 + len(values) - values.count(None) + len(request.parameters or ())
    for tensor in request.inputs:
        count += 3 + (tensor.data is not None)
        if tensor.parameters is not None:
            count += 1 + len(tensor.parameters)
    for output in request.outputs or ():
        count += 1 if output.parameters is None else 2 + len(output.parameters)
    return count


def validate_fields(fields: Mapping[str, Any], signature: Signature | None = None) -> JsonRequest:
    _check_keys(fields, "body", _FIELDS)
    inputs, outputs = _field(fields, "inputs", "", list), _field(fields, "outputs", "", list, [])
    if signature is not None:
        check_counts(len(inputs), len(outputs), signature)
    return JsonRequest(
        inputs=[_tensor(item, f"inputs.{index}") for index, item in enumerate(inputs)],
        id=_field(fields, "id", "", str, ""),
        outputs=[_output(item, f"outputs.{index}") for index, item in enumerate(outputs)],
        parameters=_parameters(fields, "parameters"),
        model_name=_field(fields, "model_name", "", str, "") or None,
    )


def index_is_ready_only(fields: Mapping[str, Any]) -> bool:
    """Return the field of a repository index request: whether it is for the models that are ready only."""
    _check_keys(fields, "body", ("ready",))
    return fields.get("ready") is not None and flag(fields, "ready", "body", default=False)


def flag(parameters: Parameters, name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{where}: {name} must be true or false")
    return value


def _tensor(fields: Any, where: str) -> Tensor:
    _check_keys(fields, where, _INPUT)
    name, datatype = _field(fields, "name", where, str), _field(fields, "datatype", where, str)
    return Tensor(name, datatype, _shape(fields, where), fields.get("data"), _parameters(fields, f"{where}.parameters"))


def _output(fields: Any, where: str) -> JsonOutput:
    _check_keys(fields, where, _OUTPUT)
    return JsonOutput(_field(fields, "name", where, str), _parameters(fields, f"{where}.parameters"))


def _check_keys(fields: Any, where: str, known: Sequence[str]) -> None:
    if not isinstance(fields, dict):
        raise InvalidPayload(f"{where}: must be a JSON object")
    for key in fields:
        if key not in known:
            raise InvalidPayload(f'{where}: unknown field "{key[:80]}"; known fields: {", ".join(known)}')


def _field(fields: Mapping[str, Any], key: str, where: str, kind: type[T], default: T | None = None) -> T:
    value = fields.get(key)
    value = default if value is None else value  # some clients write null for missing fields
    if type(value) is kind:
        return value
    place = f"{where}.{key}" if where else key
    problem = "is missing" if value is None else f"must be a {'string' if kind is str else 'list'}"
    raise InvalidPayload(f"{place}: {problem}")


def _shape(fields: Mapping[str, Any], where: str) -> list[int]:
    shape = _field(fields, "shape", where, list)
    for axis in shape:
        if type(axis) is not int or axis < 0:
            raise InvalidPayload(f"{where}.shape: must hold integers from 0 on")
    return shape


def _parameters(fields: Mapping[str, Any], where: str) -> Parameters:
    value = fields.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, bool | int | float | str) for item in value.values()):
        raise InvalidPayload(f"{where}: must be a JSON object of numbers, strings, true and false")
    return value


def is_flat_json(text: bytes) -> bool:
    """Return whether the middle of the text looks like a flat list of numbers."""
    middle = len(text) // 2
    return not text[middle : middle + _SAMPLE_BYTES].translate(None, b"0123456789+-.eE, \t\r\n")


def read_flat_json(text: bytes, signature: Signature | None = None) -> dict[str, Any] | None:
    """Return the fields, with arrays of numbers as data; None where the body has another form or an error."""
    try:
        fields = _unique_fields(simdjson.Parser().parse(text))
        if signature is not None:
            check_counts(len(fields["inputs"]), len(fields.get("outputs") or ()), signature)
        inputs = [_unique_fields(item) for item in fields["inputs"]]
        # More brackets than these mean nested lists.
        lists = 1 + 2 * len(inputs) + ("outputs" in fields)
        if count_up_to(lists, text, b"[") != lists:
            return None
        tensors = [{key: _input(key, value, item["datatype"]) for key, value in item.items()} for item in inputs]
    except (ValueError, TypeError, KeyError, RuntimeError):  # all errors of simdjson, and unexpected fields
        return None
    return {key: tensors if key == "inputs" else _plain(value) for key, value in fields.items()}


def _unique_fields(value: Any) -> dict[str, Any]:
    """Return the fields by name; raises TypeError for more than there can be.

    simdjson goes through all of them to find one.
    """
    if not isinstance(value, simdjson.Object) or len(value) > len(_FIELDS):
        raise TypeError
    names = list(value.keys())
    check_unique(names)
    return {name: value[name] for name in names}


def _input(key: str, value: Any, datatype: Any) -> Any:
    buffer = _BUFFERS.get(str(datatype)[:2])
    if key != "data" or buffer is None or not isinstance(value, simdjson.Array):
        return _plain(value)
    return np.frombuffer(value.as_buffer(of_type=buffer[0]), buffer[1])


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        first: Any = value[0] if len(value) else None
        return list(map(_plain, value)) if isinstance(first, simdjson.Object) else value.as_list()
    if isinstance(value, simdjson.Object):
        check_unique(list(value.keys()))
        return value.as_dict()
    return value
