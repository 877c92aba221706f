"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import orjson

from pipeline.spec.errors import InvalidPayload
from serve.deadline import of_parameter
from serve.predictor import Predictor
from serve.tensors import Request, Tensor, Wish, to_raw
from serve.v1 import parse_object

Parameters: TypeAlias = Mapping[str, bool | int | float | str]
Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]

LENGTH_HEADER = "inference-header-content-length"
_QUICK_BYTES = 32 << 10  # of JSON are read in well under a millisecond
_MISSING: Any = object()


@dataclass(frozen=True)
class Answer:
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


class Call:
    """One inference."""

    def __init__(self, model: str, body: bytes, length_header: str | None, version: str = "") -> None:
        self._model, self._version, self._body, self._length = model, version, body, length_header
        self._request = Request("", (), ())
        self.quick = len(body) < _QUICK_BYTES or (length_header is not None and len(length_header) < 5)

    @property
    def timeout_seconds(self) -> float:
        return of_parameter(self._request.parameters.get("timeout", 0))

    def read(self, predictor: Predictor) -> tuple[Arrays, Sequence[str]]:
        self._request = parse(self._body, self._length)
        arrays = self._request.arrays(predictor.signature)
        return arrays, [wish.name for wish in self._request.wishes(predictor.signature)]

    def write(self, predictor: Predictor, outputs: Arrays) -> Answer:
        wishes = self._request.wishes(predictor.signature)
        identity = {"model_name": self._model, "model_version": self._version, "id": self._request.id}
        return render(identity, wishes, outputs, predictor.datatypes)


def parse(body: bytes, length_header: str | None) -> Request:
    """Check the body's form; whether it fits the model is the signature's business."""
    split = len(body) if length_header is None else _json_length(length_header, len(body))
    fields = parse_object(body[:split] if split < len(body) else body)
    _check_keys(fields, "body", ("id", "parameters", "inputs", "outputs"))
    parameters = _parameters(fields, "parameters")
    binary = _flag(parameters, "binary_data_output", "parameters", default=False)
    outputs = [_wish(one, f"outputs.{index}", binary) for index, one in enumerate(_list(fields, "outputs", []))]
    inputs = _list(fields, "inputs", _MISSING)
    return Request(
        id=_text(fields, "id", "", ""),
        inputs=_tensors(inputs, memoryview(body)[split:]),
        outputs=outputs,
        binary=binary,
        parameters=parameters,
    )


def render(
    identity: Mapping[str, str], wishes: Sequence[Wish], outputs: Arrays, datatypes: Mapping[str, str]
) -> Answer:
    described, raws = [], []
    for wish in wishes:
        array = outputs[wish.name]
        body: dict[str, Any] = {"name": wish.name, "shape": array.shape, "datatype": datatypes[wish.name]}
        if wish.binary:
            raws.append(to_raw(array))
            body["parameters"] = {"binary_data_size": len(raws[-1])}
        else:  # flat; a number JSON does not know (NaN, infinity) leaves as null
            body["data"] = array.ravel().tolist() if array.dtype == np.object_ else np.ascontiguousarray(array).ravel()
        described.append(body)
    fields = {**{key: value for key, value in identity.items() if value}, "outputs": described}
    head = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join([head, *raws]), len(head)) if raws else Answer(head, None)


def _json_length(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit()) or len(header) > 18 or int(header) > size:
        raise InvalidPayload(f"{LENGTH_HEADER}: {header[:40]!r} is not a length within the body's {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Any], raw: memoryview) -> list[Tensor]:
    """Each input with its values, or with its share of the raw bytes behind the JSON, which must use all of them."""
    tensors, place = [], 0
    for index, one in enumerate(inputs):
        where = f"inputs.{index}"
        _check_keys(one, where, ("name", "shape", "datatype", "parameters", "data"))
        name, datatype = _text(one, "name", where), _text(one, "datatype", where)
        parameters, data = _parameters(one, f"{where}.parameters"), one.get("data")
        if "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            if data is not None:
                raise InvalidPayload(f"inputs: {name}: has both data and binary_data_size")
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw) - place:
                raise InvalidPayload(f"inputs: {name}: binary_data_size {size!r} is not within the raw bytes sent")
            data = bytes(raw[place : place + size])
            place += size
        elif not isinstance(data, list):
            raise InvalidPayload(
                f"inputs: {name}: data is missing" if data is None else f"{where}.data: must be a list"
            )
        tensors.append(Tensor(name, datatype, _shape(one, where), data))
    if place != len(raw):
        raise InvalidPayload(f"body: {len(raw) - place} raw bytes belong to no input")
    return tensors


def _wish(one: Any, where: str, binary: bool) -> Wish:
    _check_keys(one, where, ("name", "parameters"))
    name = _text(one, "name", where)
    return Wish(name, _flag(_parameters(one, f"{where}.parameters"), "binary_data", f"outputs: {name}", default=binary))


def _check_keys(one: Any, where: str, known: Sequence[str]) -> None:
    if not isinstance(one, dict):
        raise InvalidPayload(f"{where}: must be a JSON object")
    for key in one:
        if key not in known:
            raise InvalidPayload(f'{where}: unknown field "{key[:80]}"; there are {", ".join(known)}')


def _text(one: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = one.get(key, default)
    if isinstance(value, str):
        return value
    place = f"{where}.{key}" if where else key
    raise InvalidPayload(f"{place}: {'is missing' if value is None else 'must be a string'}")


def _list(fields: Mapping[str, Any], key: str, default: Any) -> list[Any]:
    value = fields.get(key, default)
    if isinstance(value, list):
        return value
    raise InvalidPayload(f"{key}: {'is missing' if value is _MISSING else 'must be a list'}")


def _shape(one: Mapping[str, Any], where: str) -> list[int]:
    for axis in (shape := _list(one, "shape", _MISSING) if "shape" in one else _no(f"{where}.shape: is missing")):
        if type(axis) is not int or axis < 0:
            raise InvalidPayload(f"{where}.shape: must hold whole numbers from 0 on")
    return shape


def _no(text: str) -> Any:
    raise InvalidPayload(text)


def _parameters(one: Mapping[str, Any], where: str) -> Parameters:
    value = one.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, bool | int | float | str) for item in value.values()):
        raise InvalidPayload(f"{where}: must be a JSON object of numbers, texts, true and false")
    return value


def _flag(parameters: Parameters, name: str, place: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{place}: {name} must be true or false")
    return value
