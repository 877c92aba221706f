"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipeline.spec.errors import InvalidPayload
from serve import flatjson
from serve.deadline import of_parameter
from serve.predictor import Predictor
from serve.tensors import Array, Parameters, Request, Tensor, Wish, refuse_parameters, to_raw
from serve.v1 import parse_object

LENGTH_HEADER = "inference-header-content-length"
_QUICK_BYTES = 32 << 10  # of JSON are read in well under a millisecond
_QUICK_FLAT_BYTES = 256 << 10  # so are numbers one after another, and a thread would cost more than it frees
_FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
_INPUT = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT = ("name", "parameters")


class Answer(NamedTuple):
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


class Call:
    """One inference."""

    def __init__(self, model: str, body: bytes, length_header: str | None) -> None:
        self._model, self._body, self._length = model, body, length_header
        self._parsed: Request | None = None
        self._wishes: Sequence[Wish] = ()
        self.quick = _is_quick(body, length_header)

    @property
    def timeout_seconds(self) -> float:
        return of_parameter(self.request.parameters.get("timeout", 0))

    @property
    def request(self) -> Request:
        if self._parsed is None:
            self._parsed = parse(self._body, self._length, self._model)
        return self._parsed

    def key(self) -> str:
        """The client's own id, which says who answers where versions share the requests."""
        return self.request.id

    def read(self, predictor: Predictor) -> tuple[Mapping[str, Array], Sequence[str]]:
        self._wishes = self.request.wishes(predictor.signature)
        return self.request.arrays(predictor.signature), [wish.name for wish in self._wishes]

    def write(self, predictor: Predictor, outputs: Mapping[str, Array], version: str) -> Answer:
        identity = {"model_name": self._model, "model_version": version, "id": self.request.id}
        return render(identity, self._wishes, outputs, predictor.datatypes)


def _is_quick(body: bytes, length_header: str | None) -> bool:
    if len(body) < _QUICK_BYTES:
        return True
    if length_header is not None:
        return len(length_header) < 5
    return len(body) < _QUICK_FLAT_BYTES and flatjson.likely(body)


def parse(body: bytes, length_header: str | None, model: str = "") -> Request:
    """Check the body's form; whether it fits the model is the signature's business.

    kserve's client names the model in the body too, which must then be the one its URL names.
    """
    split = len(body) if length_header is None else _json_length(length_header, len(body))
    text = body if split == len(body) else body[:split]
    fields = (flatjson.read(text) if split >= flatjson.LEAST_BYTES else None) or parse_object(text)
    _check_keys(fields, "body", _FIELDS)
    if (named := _text(fields, "model_name", "", model)) != model:
        raise InvalidPayload(f"model_name: {named[:128]!r} is not {model!r}, which the URL names")
    parameters = _parameters(fields, "parameters")
    binary = False
    if parameters:
        refuse_parameters(parameters, "parameters")
        binary = _flag(parameters, "binary_data_output", "parameters", default=False)
    outputs = [_wish(one, f"outputs.{index}", binary) for index, one in enumerate(_list(fields, "outputs", "", []))]
    return Request(
        id=_text(fields, "id", "", ""),
        inputs=_tensors(_list(fields, "inputs", ""), memoryview(body)[split:]),
        outputs=outputs,
        binary=binary,
        parameters=parameters,
    )


def render(
    identity: Mapping[str, str], wishes: Sequence[Wish], outputs: Mapping[str, Array], datatypes: Mapping[str, str]
) -> Answer:
    """JSON, then the tensors wanted raw. A number JSON does not know (NaN, infinity) is null in it."""
    described, raws = [], []
    for wish in wishes:
        array, datatype = outputs[wish.name], datatypes[wish.name]
        body: dict[str, Any] = {"name": wish.name, "shape": array.shape, "datatype": datatype}
        if wish.binary:
            raws.append(to_raw(array, datatype))
            body["parameters"] = {"binary_data_size": len(raws[-1])}
        else:  # flat; orjson writes numbers from C order only, and no objects
            body["data"] = array.ravel().tolist() if datatype == "BYTES" else array.ravel()
        described.append(body)
    fields = {**{key: value for key, value in identity.items() if value}, "outputs": described}
    head = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join([head, *raws]), len(head)) if raws else Answer(head, None)


def check_index(body: bytes) -> None:
    """What may be said when asking which models there are: that only ready ones are meant, as all of them are."""
    if body:
        _check_keys(fields := parse_object(body), "body", ("ready",))
        _flag(fields, "ready", "body", default=True)


def _json_length(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit()) or len(header) > 18 or int(header) > size:
        raise InvalidPayload(f"{LENGTH_HEADER}: {header[:40]!r} is not a length within the body's {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Any], raw: memoryview) -> list[Tensor]:
    """Each input with its values, or with its share of the raw bytes behind the JSON, which must use all of them."""
    tensors, place = [], 0
    for index, one in enumerate(inputs):
        where = f"inputs.{index}"
        _check_keys(one, where, _INPUT)
        name, datatype = _text(one, "name", where), _text(one, "datatype", where)
        parameters, data = _parameters(one, f"{where}.parameters"), one.get("data")
        if parameters:
            refuse_parameters(parameters, where)
        if "binary_data_size" in parameters:
            data = _share(parameters["binary_data_size"], raw[place:], name, data)
            place += len(data)
        elif not isinstance(data, list | np.ndarray):
            raise InvalidPayload(f"{where}.data: {'is missing' if data is None else 'must be a list'}")
        tensors.append(Tensor(name, datatype, _shape(one, where), data))
    if place != len(raw):
        raise InvalidPayload(f"body: {len(raw) - place} raw bytes belong to no input")
    return tensors


def _share(size: Any, rest: memoryview, name: str, data: Any) -> memoryview:
    if data is not None:
        raise InvalidPayload(f"inputs: {name}: has both data and binary_data_size")
    if type(size) is not int or not 0 <= size <= len(rest):
        raise InvalidPayload(f"inputs: {name}: binary_data_size {repr(size)[:40]} is not within the raw bytes sent")
    return rest[:size]


def _wish(one: Any, where: str, binary: bool) -> Wish:
    _check_keys(one, where, _OUTPUT)
    name, parameters = _text(one, "name", where), _parameters(one, f"{where}.parameters")
    if parameters:
        refuse_parameters(parameters, where)
        binary = _flag(parameters, "binary_data", f"{where}.parameters", default=binary)
    return Wish(name, binary)


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


def _flag(parameters: Parameters, name: str, place: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{place}: {name} must be true or false")
    return value
