"""Inference as protobuf messages of the Open Inference Protocol, read into requests and written from answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import NUMPY_TYPES
from serve.deadline import of_parameter
from serve.protocol import spoken
from serve.protocol.tensors import Array, Parameters, Request, Tensor, Wish, refuse_parameters, to_raw
from serve.protocol.validate import shown
from serve.runtime.predictor import Predictor

_CONTENTS: dict[str, tuple[str, Any]] = {
    "BOOL": ("bool_contents", np.bool_),
    "UINT8": ("uint_contents", np.uint32),
    "UINT16": ("uint_contents", np.uint32),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "INT8": ("int_contents", np.int32),
    "INT16": ("int_contents", np.int32),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
    "BYTES": ("bytes_contents", np.object_),
}
_RAW_ONLY = ("FP16", "BF16")  # the protocol has no typed contents for them
_PROPERTY_TAG = 6 << 3 | 2  # ModelMetadataResponse.properties, a map of texts, which kserve's descriptors lack
_QUICK_BYTES = 256 << 10  # of a message are read in well under a millisecond


class Call:
    """One inference."""

    def __init__(self, message: Any) -> None:
        self._message = message  # pb.ModelInferRequest
        self._request = Request("", (), ())
        self._wishes: Sequence[Wish] = ()
        self._count = 0
        size = message.ByteSize()
        self.quick, self.size = size < _QUICK_BYTES, size.bit_length()

    @property
    def timeout_seconds(self) -> float:
        return of_parameter(self._request.parameters.get("timeout", 0))

    def key(self) -> str:
        """The client's own id, which says who answers where versions share the requests."""
        return str(self._message.id)

    def read(self, predictor: Predictor) -> tuple[Mapping[str, Array], Sequence[str]]:
        self._request = parse(self._message)
        found = spoken.read(self._request, predictor)
        self._wishes, self._count = found.wishes, found.texts
        return found.arrays, found.names

    def write(self, predictor: Predictor, outputs: Mapping[str, Array], version: str) -> Any:
        return render(self._message, version, self._wishes, *spoken.given(self._count, outputs, predictor))


def parse(message: Any) -> Request:
    """Raw contents, when used, are used for every input; answers then are raw as well."""
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise InvalidPayload(f"raw_input_contents: {len(raws)} given for {len(message.inputs)} inputs")
    tensors = []
    for index, one in enumerate(message.inputs):
        if raws and one.HasField("contents"):
            raise InvalidPayload(f"inputs: {one.name}: has contents beside raw_input_contents")
        _parameters(one, f"inputs: {one.name}")
        shape = list(one.shape)
        if shape and min(shape) < 0:
            raise InvalidPayload(f"inputs: {one.name}: shape {shown(shape)} has a negative axis")
        tensors.append(Tensor(one.name, one.datatype, shape, raws[index] if raws else _contents(one)))
    for wish in message.outputs:
        _parameters(wish, f"outputs: {wish.name}")
    outputs = [Wish(wish.name, bool(raws)) for wish in message.outputs]
    return Request(message.id, tensors, outputs, binary=bool(raws), parameters=_parameters(message, "parameters"))


def render(
    message: Any, version: str, wishes: Sequence[Wish], outputs: Mapping[str, Array], datatypes: Mapping[str, str]
) -> Any:
    answer = pb.ModelInferResponse(model_name=message.model_name, model_version=version, id=message.id)
    # Raw and typed outputs cannot be mixed in one answer.
    raw = any(wish.binary or datatypes[wish.name] in _RAW_ONLY for wish in wishes)
    for wish in wishes:
        array, datatype = outputs[wish.name], datatypes[wish.name]
        tensor = answer.outputs.add(name=wish.name, datatype=datatype, shape=array.shape)
        if raw:
            answer.raw_output_contents.append(to_raw(array, datatype))
        else:
            values = array.ravel().tolist()
            values = [str(value).encode() for value in values] if datatype == "BYTES" else values
            getattr(tensor.contents, _CONTENTS[datatype][0]).extend(values)
    return answer


def with_properties(message: Any, properties: Mapping[str, str]) -> Any:
    """Field 6, written as the wire has it: an entry is a key (1) and a value (2), each behind tag and length."""
    for pair in properties.items():
        entry = b"".join(
            bytes([tag, *_varint(len(text))]) + text for tag, text in zip((10, 18), map(str.encode, pair), strict=True)
        )
        message.MergeFromString(bytes([_PROPERTY_TAG, *_varint(len(entry))]) + entry)
    return message


def _varint(number: int) -> Iterator[int]:
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


def _contents(one: Any) -> Array | list[str]:
    """The values where the datatype has them; elsewhere they would be overlooked."""
    if one.datatype not in NUMPY_TYPES:
        raise InvalidPayload(f"inputs: {one.name}: unknown datatype {one.datatype[:40]!r}")
    if one.datatype in _RAW_ONLY:
        raise InvalidPayload(f"inputs: {one.name}: {one.datatype} travels in raw_input_contents only")
    place, kind = _CONTENTS[one.datatype]
    for used, _ in one.contents.ListFields():
        if used.name != place:
            raise InvalidPayload(f"inputs: {one.name}: {one.datatype} travels in {place}, not in {used.name}")
    values = getattr(one.contents, place)
    if one.datatype != "BYTES":
        return np.fromiter(values, kind, len(values))
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        raise InvalidPayload(f"inputs: {one.name}: bytes_contents holds an element that is not UTF-8") from None


def _parameters(one: Any, where: str) -> Parameters:
    """As REST has them; one without a value says nothing."""
    if not one.parameters:
        return {}
    chosen = ((name, value, value.WhichOneof("parameter_choice")) for name, value in one.parameters.items())
    found = {name: getattr(value, choice) for name, value, choice in chosen if choice}
    refuse_parameters(found, where)
    return found
