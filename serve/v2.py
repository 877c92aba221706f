"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.spec.errors import InvalidPayload
from serve.predictor import Predictor
from serve.tensors import Request, Tensor, Wish, to_raw
from serve.v1 import parse_object

LENGTH_HEADER = "inference-header-content-length"
Parameters: TypeAlias = dict[str, bool | int | float | str]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Input(_Strict):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: str
    parameters: Parameters = {}
    data: list[Any] | None = None


class Output(_Strict):
    name: str
    parameters: Parameters = {}


class Body(_Strict):
    """The request's JSON."""

    id: str = ""
    parameters: Parameters = {}
    inputs: list[Input]
    outputs: list[Output] = []


@dataclass(frozen=True)
class Answer:
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


@dataclass(frozen=True)
class Call:
    """One inference, to be made off the event loop."""

    model: str
    body: bytes
    length_header: str | None

    def answer(self, predictor: Predictor) -> Answer:
        with predictor.timed("preprocess"):
            request = parse(self.body, self.length_header)
            arrays = request.arrays(predictor.signature)
        wishes = request.wishes(predictor.signature)
        outputs = predictor.run(arrays, [wish.name for wish in wishes])
        with predictor.timed("postprocess"):
            return render(self.model, request.id, wishes, outputs, _datatypes(predictor))


def parse(body: bytes, length_header: str | None) -> Request:
    """Check the body's form; whether it fits the model is the signature's business."""
    split = len(body) if length_header is None else _json_length(length_header, len(body))
    try:
        fields = Body.model_validate(parse_object(body[:split]))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidPayload(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    binary = _flag(fields.parameters, "binary_data_output", "parameters", default=False)
    return Request(
        id=fields.id,
        inputs=_tensors(fields.inputs, body[split:]),
        outputs=[
            Wish(wish.name, _flag(wish.parameters, "binary_data", f"outputs: {wish.name}", default=binary))
            for wish in fields.outputs
        ],
        binary=binary,
    )


def render(
    model: str,
    request_id: str,
    wishes: Sequence[Wish],
    outputs: Mapping[str, np.ndarray[Any, Any]],
    datatypes: Mapping[str, str],
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
    fields: dict[str, Any] = {"model_name": model, "outputs": described}
    if request_id:
        fields["id"] = request_id
    head = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join([head, *raws]), len(head) if raws else None)


def _datatypes(predictor: Predictor) -> dict[str, str]:
    return {spec.name: spec.datatype for spec in predictor.signature.outputs}


def _json_length(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit()) or len(header) > 18 or int(header) > size:
        raise InvalidPayload(f"{LENGTH_HEADER}: {header[:40]!r} is not a length within the body's {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Input], raw: bytes) -> list[Tensor]:
    """Each input with its values, or with its share of the raw bytes behind the JSON, which must use all of them."""
    tensors, place = [], 0
    for one in inputs:
        data: list[Any] | bytes | None = one.data
        if "binary_data_size" in one.parameters:
            size = one.parameters["binary_data_size"]
            if data is not None:
                raise InvalidPayload(f"inputs: {one.name}: has both data and binary_data_size")
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw) - place:
                raise InvalidPayload(f"inputs: {one.name}: binary_data_size {size!r} is not within the raw bytes sent")
            data = raw[place : place + size]
            place += size
        if data is None:
            raise InvalidPayload(f"inputs: {one.name}: data is missing")
        tensors.append(Tensor(one.name, one.datatype, one.shape, data))
    if place != len(raw):
        raise InvalidPayload(f"body: {len(raw) - place} raw bytes belong to no input")
    return tensors


def _flag(parameters: Parameters, name: str, place: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidPayload(f"{place}: {name} must be true or false")
    return value
