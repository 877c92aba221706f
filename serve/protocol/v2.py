"""The Open Inference Protocol over REST: JSON, and JSON followed by raw tensors (binary data extension).

Where the golden instances of a model are strings, it also accepts a BYTES tensor of instances, which goes through the
codec as in V1, and returns a BYTES tensor of predictions. Requests with the graph's own tensors work as always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import orjson

from pipeline.contract.codec import Arrays, Part
from pipeline.contract.signature import Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.protocol.classification import PARAMETER, classify, parse_classification
from serve.protocol.tensors import InferRequest, RequestedOutput, Tensor, raw_type, reject_parameters, to_raw
from serve.protocol.v2_json import JsonOutput, flag, read_v2_json
from serve.protocol.validate import format_shape
from serve.request_context import parse_timeout_parameter
from serve.runtime.predictor import Predictor

LENGTH_HEADER = "inference-header-content-length"
_QUICK_BYTES = 32 << 10  # of JSON, which is parsed in well under a millisecond


class Answer(NamedTuple):
    body: bytes
    json_bytes: int | None  # length of the JSON part when raw tensors follow it


class Payload:
    """The body of tensor inference."""

    uses_codec = False

    def __init__(self, model: str, body: bytes, length_header: str | None, signature: Signature | None) -> None:
        """`signature`: of the model's current version, by which a flood of tensors is refused."""
        self._model, self._body, self._length, self._signature = model, body, length_header, signature
        self._is_raw = length_header == "0" and bool(body)
        # The request of raw bytes has no fields, and becomes an input once the signature is known.
        self._parsed: InferRequest | None = InferRequest("", (), ()) if self._is_raw else None
        self._decoded = NOT_DECODED
        self.is_quick = len(body) < _QUICK_BYTES or (length_header is not None and len(length_header) < 5)

    @property
    def timeout_seconds(self) -> float:
        return parse_timeout_parameter(self.request.parameters.get("timeout", 0))

    @property
    def request(self) -> InferRequest:
        if self._parsed is None:
            self._parsed = parse(self._body, self._length, self._model, self._signature)
        return self._parsed

    def request_id(self) -> str:
        """Return the client's id, by which requests are divided between versions."""
        return self.request.id

    def decode(self, predictor: Predictor) -> tuple[Sequence[Part], Sequence[str]]:
        request = raw_request(self._body, predictor.signature) if self._is_raw else self.request
        self._decoded = decode_request(request, predictor)
        self.is_quick = self.is_quick and not has_classes(self._decoded.requested_outputs)
        return self._decoded.parts, self._decoded.names

    def encode(self, predictor: Predictor, outputs: Sequence[Arrays], version: str) -> Answer:
        identity = {"model_name": self._model, "model_version": version, "id": self.request.id}
        return render(identity, self._decoded.requested_outputs, *encode_outputs(self._decoded, outputs, predictor))


def parse(body: bytes, length_header: str | None, model: str = "", signature: Signature | None = None) -> InferRequest:
    """Parse a body and validate its fields; of the signature, only the number of tensors counts here.

    kserve's client also names the model in the body; it must be the tensor in the URL.
    """
    split = len(body) if length_header is None else _json_length(length_header, len(body))
    fields = read_v2_json(body if split == len(body) else body[:split], signature)
    if fields.model_name and fields.model_name != model:
        raise InvalidPayload(f"model_name: {fields.model_name[:128]!r} is not {model!r}, the model in the URL")
    binary = False
    if fields.parameters:
        reject_parameters(fields.parameters, "parameters")
        binary = flag(fields.parameters, "binary_data_output", "parameters", default=False)
    outputs = [_requested_output(item, f"outputs[{index}]", binary) for index, item in enumerate(fields.outputs or ())]
    inputs = _tensors(fields.inputs, memoryview(body)[split:])
    return InferRequest(fields.id or "", inputs, outputs, binary, fields.parameters or {})


def raw_request(body: bytes, signature: Signature) -> InferRequest:
    """Return the request of a body without JSON (Triton's raw binary request): the only input, as a batch of one row.

    The size of at most one more axis follows from that of the body. All outputs are requested as raw bytes.
    """
    if len(signature.inputs) != 1:
        raise InvalidPayload(
            f"{LENGTH_HEADER}: is 0, so that the body is the model's only input; this model has {len(signature.inputs)}"
        )
    (spec,) = signature.inputs
    shape = list(spec.shape)
    shape[:1] = [1 if isinstance(axis, str) else axis for axis in shape[:1]]
    free = [place for place, axis in enumerate(shape) if isinstance(axis, str)]
    if len(free) > 1:
        given = format_shape(spec.shape)
        raise InvalidPayload(f"{LENGTH_HEADER}: is 0, but the shape {given} does not follow from a size")
    data: Any = memoryview(body)
    count = len(body) // raw_type(spec.datatype).itemsize
    if spec.datatype == "BYTES":  # one element, without its length
        try:
            data, count = [body.decode()], 1
        except UnicodeDecodeError:
            raise InvalidPayload(f"{spec.name}: the body is not UTF-8") from None
    if free:
        known = math.prod(axis for axis in shape if isinstance(axis, int))
        shape[free[0]] = count // known if known else 0
    tensor = Tensor(spec.name, spec.datatype, cast("list[int]", shape), data)
    return InferRequest("", (tensor,), (), binary=True)


def render(
    identity: Mapping[str, str], requested: Sequence[RequestedOutput], outputs: Arrays, datatypes: Mapping[str, str]
) -> Answer:
    """Return JSON and, after it, raw tensors. NaN and infinity, which JSON does not have, become null."""
    descriptions, raws = [], []
    for output in requested:
        array, datatype = outputs[output.name], datatypes[output.name]
        body: dict[str, Any] = {"name": output.name, "shape": array.shape, "datatype": datatype}
        if output.binary:
            raws.append(to_raw(array, datatype))
            body["parameters"] = {"binary_data_size": len(raws[-1])}
        else:  # flat; orjson writes contiguous numeric arrays only
            body["data"] = array.ravel().tolist() if datatype == "BYTES" else array.ravel()
        descriptions.append(body)
    fields = {**{key: value for key, value in identity.items() if value}, "outputs": descriptions}
    head = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join([head, *raws]), len(head)) if raws else Answer(head, None)


def json_bytes(header: str) -> float:
    """Return how many bytes of a body are JSON by its header; infinity for all."""
    if not (header.isascii() and header.isdigit()) or len(header) > 18:
        return math.inf
    return int(header)


def _json_length(header: str, size: int) -> int:
    if json_bytes(header) > size:
        raise InvalidPayload(f"{LENGTH_HEADER}: {header[:40]!r} is not a length within the body's {size} bytes")
    return int(header)


def _tensors(inputs: Sequence[Tensor], raw: memoryview) -> Sequence[Tensor]:
    """Give each input its part of the raw bytes after the JSON; all of them must be used."""
    used = 0
    for index, tensor in enumerate(inputs):
        if tensor.parameters:
            reject_parameters(tensor.parameters, f"inputs[{index}]")
            if "binary_data_size" in tensor.parameters:
                tensor.data = _raw_part(tensor.parameters["binary_data_size"], raw[used:], tensor)
                used += len(tensor.data)
        if not (isinstance(tensor.data, list | memoryview) or callable(tensor.data)):
            raise InvalidPayload(f"inputs[{index}].data: {'is missing' if tensor.data is None else 'must be a list'}")
    if used != len(raw):
        raise InvalidPayload(f"body: {len(raw) - used} raw bytes are not used by any input")
    return inputs


def _raw_part(size: Any, rest: memoryview, tensor: Tensor) -> memoryview:
    if tensor.data is not None:
        raise InvalidPayload(f"inputs: {tensor.name}: has both data and binary_data_size")
    if type(size) is not int or not 0 <= size <= len(rest):
        given = repr(size)[:40]
        raise InvalidPayload(f"inputs: {tensor.name}: binary_data_size {given} is not within the raw bytes sent")
    return rest[:size]


def _requested_output(item: JsonOutput, where: str, binary: bool) -> RequestedOutput:
    if not item.parameters:
        return RequestedOutput(item.name, binary)
    reject_parameters(item.parameters, where, supported=PARAMETER)
    binary = flag(item.parameters, "binary_data", f"{where}.parameters", default=binary)
    return RequestedOutput(item.name, binary, parse_classification(item.parameters.get(PARAMETER), where))


def has_classes(requested_outputs: Sequence[RequestedOutput]) -> bool:
    """Return whether outputs have to be sorted, which may take long."""
    for output in requested_outputs:  # noqa: SIM110  # for every request: a generator costs more than the one output
        if output.classes:
            return True
    return False


INSTANCES, PREDICTIONS = "instances", "predictions"
_DATATYPES = {PREDICTIONS: "BYTES"}


class DecodedRequest(NamedTuple):
    """Inputs of the model, and what the answer contains."""

    parts: Sequence[Part]  # one, unless the instances are of several lengths that must not be padded
    names: Sequence[str]  # of the outputs to compute
    requested_outputs: Sequence[RequestedOutput]
    text_count: int = 0  # instances, if they were strings


NOT_DECODED = DecodedRequest((), (), ())


def text_signature(signature: Signature, instances: Sequence[Any]) -> Signature | None:
    """Return the signature for string instances; None where the codec's instances are not strings."""
    are_texts = bool(instances) and all(isinstance(instance, str) for instance in instances)
    if not are_texts or INSTANCES in signature.input_specs:
        return None
    texts, answers = (TensorSpec(name=name, datatype="BYTES", shape=("batch",)) for name in (INSTANCES, PREDICTIONS))
    return Signature(
        inputs=(texts,), outputs=(answers,), codec=signature.codec, limits=signature.limits, runtime=signature.runtime
    )


def decode_request(request: InferRequest, predictor: Predictor) -> DecodedRequest:
    text_signature = predictor.text_signature
    if text_signature is None or [tensor.name for tensor in request.inputs] != [INSTANCES]:
        requested_outputs = request.requested_outputs(predictor.signature)
        part = Part((), request.arrays(predictor.signature))
        return DecodedRequest([part], [output.name for output in requested_outputs], requested_outputs)
    texts = request.arrays(text_signature)[INSTANCES].tolist()
    parts, requested_outputs = predictor.decode(texts), request.requested_outputs(text_signature)
    return DecodedRequest(parts, predictor.session.output_names, requested_outputs, len(texts))


def encode_outputs(
    decoded: DecodedRequest, outputs: Sequence[Arrays], predictor: Predictor
) -> tuple[Arrays, Mapping[str, str]]:
    """Return the tensors of the answer and their datatypes; predictions that are not strings are written as JSON."""
    if not (count := decoded.text_count):
        arrays, datatypes = outputs[0], predictor.datatypes
        for output in decoded.requested_outputs:
            if output.classes:
                spec = next(spec for spec in predictor.signature.outputs if spec.name == output.name)
                arrays = {**arrays, output.name: classify(arrays[output.name], spec, output.classes)}
                datatypes = {**datatypes, output.name: "BYTES"}
        return arrays, datatypes
    predictions = np.empty(count, object)
    predictions[:] = [_text(prediction) for prediction in predictor.encode(outputs, decoded.parts)]
    return {PREDICTIONS: predictions}, _DATATYPES


def _text(prediction: Any) -> str:
    if isinstance(prediction, str):
        return prediction
    return orjson.dumps(prediction, option=orjson.OPT_SERIALIZE_NUMPY).decode()
