"""Protobuf messages of the Open Inference Protocol, and how gRPC frames them in HTTP/2.

A message is decoded into the same `Request` as V2's JSON. On the wire five bytes precede it, and a status follows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from pipeline.contract.codec import Array, Arrays, Part
from pipeline.contract.signature import NUMPY_TYPES, Signature
from pipeline.system.errors import InvalidPayload
from serve.errors import Busy, RequestError, TooLarge, Unimplemented
from serve.grpc.open_inference import ModelInferResponse
from serve.limits import BodyLimits, Budget
from serve.protocol import v2
from serve.protocol.classification import PARAMETER, parse_classification
from serve.protocol.tensors import (
    InferRequest,
    Parameters,
    RequestedOutput,
    Tensor,
    check_parameter_count,
    reject_parameters,
    to_raw,
)
from serve.protocol.validate import check_counts, format_shape
from serve.request_body import Inflater
from serve.request_context import RequestContext, parse_timeout_parameter
from serve.runtime.predictor import Predictor
from serve.wire.http2 import hpack
from serve.wire.http2.stream import Stream
from serve.wire.http2.streams import Streams

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
_QUICK_BYTES = 256 << 10  # a message of this size is decoded in well under a millisecond


class Payload:
    """The message of one inference."""

    uses_codec = False

    def __init__(self, message: Any) -> None:
        self._message = message  # a ModelInferRequest
        self._request = InferRequest("", (), ())
        self._decoded = v2.NOT_DECODED
        self.is_quick = message.ByteSize() < _QUICK_BYTES

    @property
    def timeout_seconds(self) -> float:
        return parse_timeout_parameter(self._request.parameters.get("timeout", 0))

    def request_id(self) -> str:
        """Return the client's own id, which chooses between a version and its canary."""
        return str(self._message.id)

    def decode(self, predictor: Predictor) -> tuple[Sequence[Part], Sequence[str]]:
        self._request = parse(self._message, predictor.signature)
        self._decoded = v2.decode_request(self._request, predictor)
        self.is_quick = self.is_quick and not v2.has_classes(self._decoded.requested_outputs)
        return self._decoded.parts, self._decoded.names

    def encode(self, predictor: Predictor, outputs: Sequence[Arrays], version: str) -> Any:
        answer = v2.encode_outputs(self._decoded, outputs, predictor)
        return render(self._message, version, self._decoded.requested_outputs, *answer)


def parse(message: Any, signature: Signature) -> InferRequest:
    """Return the request. Raw contents, if used, are used for every input, and for the outputs as well."""
    check_counts(len(message.inputs), len(message.outputs), signature)
    inputs = list(message.inputs)
    for one in inputs:  # first: an input in shared memory has no raw contents
        if one.parameters:
            _parameters(one, f"inputs: {one.name}")
    if message.raw_input_contents and len(message.raw_input_contents) != len(inputs):
        raise InvalidPayload(f"raw_input_contents: {len(message.raw_input_contents)} given for {len(inputs)} inputs")
    raws, tensors = list(message.raw_input_contents), []
    for index, one in enumerate(inputs):
        if raws and one.HasField("contents"):
            raise InvalidPayload(f"inputs: {one.name}: has contents beside raw_input_contents")
        shape = list(one.shape)
        if shape and min(shape) < 0:
            raise InvalidPayload(f"inputs: {one.name}: shape {format_shape(shape)} has a negative axis")
        tensors.append(Tensor(one.name, one.datatype, shape, raws[index] if raws else _contents(one)))
    outputs = [_requested_output(output, bool(raws)) for output in message.outputs]
    return InferRequest(message.id, tensors, outputs, binary=bool(raws), parameters=_parameters(message, "parameters"))


def _requested_output(output: Any, binary: bool) -> RequestedOutput:
    where = f"outputs: {output.name}"
    parameters = _parameters(output, where, supported=PARAMETER)
    return RequestedOutput(output.name, binary, parse_classification(parameters.get(PARAMETER), where))


def render(
    message: Any, version: str, requested: Sequence[RequestedOutput], outputs: Arrays, datatypes: Mapping[str, str]
) -> Any:
    answer = ModelInferResponse(model_name=message.model_name, model_version=version, id=message.id)
    # Raw and typed outputs cannot be mixed in one answer.
    raw = any(output.binary or datatypes[output.name] in _RAW_ONLY for output in requested)
    for output in requested:
        array, datatype = outputs[output.name], datatypes[output.name]
        tensor = answer.outputs.add(name=output.name, datatype=datatype, shape=array.shape)
        if raw:
            answer.raw_output_contents.append(to_raw(array, datatype))
        else:
            values = array.ravel().tolist()
            values = [str(value).encode() for value in values] if datatype == "BYTES" else values
            getattr(tensor.contents, _CONTENTS[datatype][0]).extend(values)
    return answer


def _contents(one: Any) -> Callable[[], Array | list[str]]:
    """Return what reads the field for this datatype, once it is known that there may be so many values.

    Values in another field are an error.
    """
    if one.datatype not in NUMPY_TYPES:
        raise InvalidPayload(f"inputs: {one.name}: unknown datatype {one.datatype[:40]!r}")
    if one.datatype in _RAW_ONLY:
        raise InvalidPayload(f"inputs: {one.name}: {one.datatype} must be in raw_input_contents")
    place, kind = _CONTENTS[one.datatype]
    for used, _ in one.contents.ListFields():
        if used.name != place:
            raise InvalidPayload(f"inputs: {one.name}: {one.datatype} must be in {place}, not in {used.name}")
    return partial(_read_contents, one, getattr(one.contents, place), kind)


def _read_contents(one: Any, values: Sequence[Any], kind: Any) -> Array | list[str]:
    if len(values) != math.prod(one.shape):
        given = format_shape(one.shape)
        raise InvalidPayload(f"{one.name}: data with {len(values)} elements does not fill the shape {given}")
    if one.datatype != "BYTES":
        return np.fromiter(values, kind, len(values))
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        raise InvalidPayload(f"inputs: {one.name}: bytes_contents holds an element that is not UTF-8") from None


def _parameters(one: Any, where: str, supported: str = "") -> Parameters:
    """Return the parameters as REST has them; one without a value is ignored."""
    if not one.parameters:
        return {}
    check_parameter_count(one.parameters, where)
    chosen = ((name, value, value.WhichOneof("parameter_choice")) for name, value in one.parameters.items())
    found = {name: getattr(value, choice) for name, value, choice in chosen if choice}
    reject_parameters(found, where, supported)
    return found


COPIES = 3  # of a message: in pieces, whole, and as fields
CODINGS = b"identity, deflate, gzip"
PREFIX = struct.Struct(">BI")  # whether it is compressed, and its length
_NAMES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS "
    "UNAUTHENTICATED"
)
_CODES = {name: b"%d" % number for number, name in enumerate(_NAMES.split())}
_MAX_TEXT_BYTES = 2000  # of a status; three times as many if encoded, and gRPC clients take 8 KB of headers
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

ANSWER = hpack.encode_status(200) + hpack.encode_literals(
    ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", CODINGS))
)
OK = hpack.encode_literals(((b"grpc-status", b"0"),))


class MalformedMessage(RequestError):
    """The body of a call is not one message."""

    reason = "wire"


def frame_message(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def check_size(parts: Sequence[bytes], size: int, most: int) -> None:
    """Refuse a message that is too large as soon as its prefix is here."""
    declared = 0
    if size >= PREFIX.size:
        first = parts[0] if len(parts[0]) >= PREFIX.size else b"".join(parts[: PREFIX.size])
        declared = int.from_bytes(first[1:5], "big")
    if declared > most or size > most + PREFIX.size:
        raise too_large(max(declared, size - PREFIX.size), most)


def too_large(size: int, most: int) -> TooLarge:
    return TooLarge(f"message: of {size} bytes, it is larger than max, which is {most} bytes")


def unframe_message(body: bytes, most: int) -> tuple[bytes, bool]:
    """Return the one message of a call, and whether it is compressed."""
    if len(body) < PREFIX.size:
        if body:
            raise MalformedMessage(f"message: ends after {len(body)} bytes, in the middle of its prefix")
        raise Unimplemented("message: none was sent; every method here needs one")
    compressed, size = PREFIX.unpack_from(body)
    if size > most:
        raise too_large(size, most)
    if size > len(body) - PREFIX.size:
        raise MalformedMessage(f"message: ends after {len(body) - PREFIX.size} of its {size} bytes")
    if size < len(body) - PREFIX.size:
        raise Unimplemented("message: more than one was sent; no method here takes a stream")
    if compressed > 1:
        raise MalformedMessage(f"message: its first byte is 0 or 1, not {compressed}")
    return body[PREFIX.size :], bool(compressed)


async def decompress(data: bytes, coding: str, request: RequestContext, limits: BodyLimits, budget: Budget) -> bytes:
    """Decompress a message, a slice at a time."""
    if not coding:
        raise MalformedMessage("message: is marked as compressed, but grpc-encoding names no encoding")
    parts: list[bytes] = []
    inflater = Inflater(coding, limits)
    async for part in inflater.feed_in_turns(data, budget):
        request.work += len(part)
        budget.reserve(request, COPIES * len(part))
        parts.append(part)
    inflater.end()
    return b"".join(parts)


def encoding_name(header: bytes | None) -> str:
    """Return what `grpc-encoding` names; empty for none."""
    name = (header or b"identity").decode("latin-1")
    if name == "identity":
        return ""
    if name in ("gzip", "deflate"):
        return name
    raise Unimplemented(f"grpc-encoding: {name[:40]!r} is not supported; send one of {CODINGS.decode()}")


def status_headers(code: str, text: str) -> bytes:
    """Return the encoded headers of a status that is not OK; a text that is too long for clients is cut."""
    if len(data := text.encode(errors="replace")) > _MAX_TEXT_BYTES:
        text = data[:_MAX_TEXT_BYTES].decode(errors="ignore") + "…"
    return hpack.encode_literals(((b"grpc-status", _CODES[code]), (b"grpc-message", percent_encode(text))))


def percent_encode(text: str) -> bytes:
    """Encode a text as gRPC does in headers."""
    data = text.encode(errors="replace")
    if _PLAIN.issuperset(data):
        return data
    return b"".join([b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in data])


_MAX_MESSAGE_BYTES = 4096  # of a client; the messages are names


class Answering(Protocol):
    """One call that is answered as its messages arrive. Errors that it raises end the call with their status."""

    def on_message(self, message: Any) -> None:
        """Handle a message of the client."""

    def on_end(self) -> None:
        """Handle the end of the client's messages."""

    def close(self) -> None:
        """Clean up after the call has ended, in whatever way."""


Open = Callable[["MessageStream"], Answering]


class MessageStream:
    """The messages of one call that has several, in either direction.

    Messages of an answer are small and few: each is sent at once where the client's flow control windows have room for
    it, and none is queued. A client that opens no window loses its call.
    """

    def __init__(self, streams: Streams, stream: Stream, end: Callable[[Exception | None], None]) -> None:
        """`end` ends the call, with the status of an error or with OK."""
        self._streams, self._stream, self.end = streams, stream, end
        self._received = b""
        self.has_begun = False  # the headers of the answer have been sent

    def send(self, message: Any) -> None:
        data = frame_message(message.SerializeToString())
        head = b"" if self.has_begun else ANSWER
        if not self._streams.send_part(self._stream, head, data):
            raise Busy("the client takes no more messages of this call")
        self.has_begun = True

    def receive(self) -> Iterator[bytes]:
        """Yield the messages that are complete; the stream keeps the rest."""
        parts, self._stream.parts = self._stream.parts, []
        self._received += b"".join(parts)
        while len(self._received) >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(self._received)
            if compressed:
                raise Unimplemented("message: compressed messages are not supported in this method")
            if size > _MAX_MESSAGE_BYTES:
                raise too_large(size, _MAX_MESSAGE_BYTES)
            end = PREFIX.size + size
            if len(self._received) < end:
                return
            message, self._received = self._received[PREFIX.size : end], self._received[end:]
            yield message

    def check_end(self) -> None:
        if self._received:
            raise MalformedMessage("message: the call ends in the middle of it")
