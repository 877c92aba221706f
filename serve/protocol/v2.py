"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipeline.spec.errors import InvalidPayload
from serve.deadline import of_parameter
from serve.protocol import flatjson, spoken
from serve.protocol.form import Output, flag, read
from serve.protocol.tensors import Array, Request, Tensor, Wish, refuse_parameters, to_raw
from serve.runtime.predictor import Predictor

LENGTH_HEADER = "inference-header-content-length"
_QUICK_BYTES = 32 << 10  # of JSON are read in well under a millisecond
_QUICK_FLAT_BYTES = 256 << 10  # so are numbers one after another, and a thread would cost more than it frees


class Answer(NamedTuple):
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


class Call:
    """One inference."""

    def __init__(self, model: str, body: bytes, length_header: str | None) -> None:
        self._model, self._body, self._length = model, body, length_header
        self._parsed: Request | None = None
        self._wishes: Sequence[Wish] = ()
        self._count = 0
        self.quick, self.size = _is_quick(body, length_header), len(body).bit_length()

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
        found = spoken.read(self.request, predictor)
        self._wishes, self._count = found.wishes, found.texts
        return found.arrays, found.names

    def write(self, predictor: Predictor, outputs: Mapping[str, Array], version: str) -> Answer:
        identity = {"model_name": self._model, "model_version": version, "id": self.request.id}
        return render(identity, self._wishes, *spoken.given(self._count, outputs, predictor))


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
    form = read(body if split == len(body) else body[:split])
    if form.model_name and form.model_name != model:
        raise InvalidPayload(f"model_name: {form.model_name[:128]!r} is not {model!r}, which the URL names")
    binary = False
    if form.parameters:
        refuse_parameters(form.parameters, "parameters")
        binary = flag(form.parameters, "binary_data_output", "parameters", default=False)
    outputs = [_wish(one, f"outputs.{index}", binary) for index, one in enumerate(form.outputs or ())]
    inputs = _tensors(form.inputs, memoryview(body)[split:])
    return Request(form.id or "", inputs, outputs, binary, form.parameters or {})


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


def _json_length(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit()) or len(header) > 18 or int(header) > size:
        raise InvalidPayload(f"{LENGTH_HEADER}: {header[:40]!r} is not a length within the body's {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Tensor], raw: memoryview) -> Sequence[Tensor]:
    """Each input with its values, or with its share of the raw bytes behind the JSON, which must use all of them."""
    place = 0
    for index, one in enumerate(inputs):
        if one.parameters:
            refuse_parameters(one.parameters, f"inputs.{index}")
            if "binary_data_size" in one.parameters:
                one.data = _share(one.parameters["binary_data_size"], raw[place:], one)
                place += len(one.data)
        if not isinstance(one.data, list | np.ndarray | memoryview):
            raise InvalidPayload(f"inputs.{index}.data: {'is missing' if one.data is None else 'must be a list'}")
    if place != len(raw):
        raise InvalidPayload(f"body: {len(raw) - place} raw bytes belong to no input")
    return inputs


def _share(size: Any, rest: memoryview, one: Tensor) -> memoryview:
    if one.data is not None:
        raise InvalidPayload(f"inputs: {one.name}: has both data and binary_data_size")
    if type(size) is not int or not 0 <= size <= len(rest):
        raise InvalidPayload(f"inputs: {one.name}: binary_data_size {repr(size)[:40]} is not within the raw bytes sent")
    return rest[:size]


def _wish(one: Output, where: str, binary: bool) -> Wish:
    if one.parameters:
        refuse_parameters(one.parameters, where)
        binary = flag(one.parameters, "binary_data", f"{where}.parameters", default=binary)
    return Wish(one.name, binary)
