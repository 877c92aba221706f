"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (the binary data extension).

Texts over the Open Inference Protocol: instances and predictions as tensors of BYTES, through the codec as in V1.

A model has it whose golden instances are texts. Whoever sends the tensors of the graph is answered with tensors still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipeline.contract.errors import InvalidPayload
from pipeline.contract.signature import Signature, TensorSpec
from serve.protocol import v2_json
from serve.protocol.tensors import Array, Request, Tensor, Wish, refuse_parameters, to_raw
from serve.protocol.v2_json import Output, flag, read_v2_json
from serve.request_context import parse_timeout_parameter
from serve.runtime.predictor import Predictor

LENGTH_HEADER = "inference-header-content-length"
_QUICK_BYTES = 32 << 10  # of JSON are read in well under a millisecond
_QUICK_FLAT_BYTES = 256 << 10  # so are numbers one after another, and a thread would cost more than it frees


class Answer(NamedTuple):
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


class Payload:
    """The body of one inference."""

    def __init__(self, model: str, body: bytes, length_header: str | None) -> None:
        self._model, self._body, self._length = model, body, length_header
        self._parsed: Request | None = None
        self._wishes: Sequence[Wish] = ()
        self._count = 0
        self.is_quick = _is_quick(body, length_header)

    @property
    def timeout_seconds(self) -> float:
        return parse_timeout_parameter(self.request.parameters.get("timeout", 0))

    @property
    def request(self) -> Request:
        if self._parsed is None:
            self._parsed = parse(self._body, self._length, self._model)
        return self._parsed

    def request_id(self) -> str:
        """The client's own id, which says who answers where versions share the requests."""
        return self.request.id

    def decode(self, predictor: Predictor) -> tuple[Mapping[str, Array], Sequence[str]]:
        found = read_texts(self.request, predictor)
        self._wishes, self._count = found.wishes, found.texts
        return found.arrays, found.names

    def encode(self, predictor: Predictor, outputs: Mapping[str, Array], version: str) -> Answer:
        identity = {"model_name": self._model, "model_version": version, "id": self.request.id}
        return render(identity, self._wishes, *given(self._count, outputs, predictor))


def _is_quick(body: bytes, length_header: str | None) -> bool:
    if len(body) < _QUICK_BYTES:
        return True
    if length_header is not None:
        return len(length_header) < 5
    return len(body) < _QUICK_FLAT_BYTES and v2_json.is_flat_json(body)


def parse(body: bytes, length_header: str | None, model: str = "") -> Request:
    """Check the body's form; whether it fits the model is the signature's business.

    kserve's client names the model in the body too, which must then be the one its URL names.
    """
    split = len(body) if length_header is None else _json_length(length_header, len(body))
    form = read_v2_json(body if split == len(body) else body[:split])
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


INSTANCES, PREDICTIONS = "instances", "predictions"
_DATATYPES = {PREDICTIONS: "BYTES"}


class Read(NamedTuple):
    """What is run for a request, and what its answer is made of."""

    arrays: Mapping[str, Array]
    names: Sequence[str]  # of the outputs the model is asked for
    wishes: Sequence[Wish]
    texts: int = 0  # how many came


def signature_of(signature: Signature, instances: Sequence[Any]) -> Signature | None:
    """What is taken and given beside the graph's own tensors, if the codec's instances are texts."""
    if not instances or not all(isinstance(one, str) for one in instances) or INSTANCES in signature.input_specs:
        return None
    return Signature(
        inputs=(TensorSpec(name=INSTANCES, datatype="BYTES", shape=("batch",)),),
        outputs=(TensorSpec(name=PREDICTIONS, datatype="BYTES", shape=("batch",)),),
        codec=signature.codec,
        limits=signature.limits,
        runtime=signature.runtime,
    )


def read_texts(request: Request, predictor: Predictor) -> Read:
    text_signature = predictor.text_signature
    if text_signature is None or [one.name for one in request.inputs] != [INSTANCES]:
        wishes = request.wishes(predictor.signature)
        return Read(request.arrays(predictor.signature), [wish.name for wish in wishes], wishes)
    texts = request.arrays(text_signature)[INSTANCES].tolist()
    return Read(predictor.decode(texts), predictor.session.outputs, request.wishes(text_signature), len(texts))


def given(
    count: int, outputs: Mapping[str, Array], predictor: Predictor
) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    """The tensors of the answer and their datatypes; a prediction that is no text is one in JSON, as V1 writes it."""
    if not count:
        return outputs, predictor.datatypes
    found = np.empty(count, object)
    found[:] = [_text(one) for one in predictor.encode(outputs, count)]
    return {PREDICTIONS: found}, _DATATYPES


def _text(prediction: Any) -> str:
    if isinstance(prediction, str):
        return prediction
    return orjson.dumps(prediction, option=orjson.OPT_SERIALIZE_NUMPY).decode()
