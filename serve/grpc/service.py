"""The gRPC calls of the service: each from its head to its response; every refusal is a status with a sentence."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from google.protobuf.message import DecodeError

from pipeline.system.errors import InvalidPayload
from serve.errors import (
    INTERNAL,
    ClientDisconnected,
    MethodNotAllowed,
    RequestError,
    RequestTimeout,
    TooManyHeaders,
    Unimplemented,
    UnsupportedMediaType,
)
from serve.grpc import health, messages, open_inference
from serve.grpc.descriptors import ProtoFile
from serve.grpc.messages import Answering, MessageStream, Open, Payload
from serve.limits import SMALL_BYTES, BodyLimits, Budget, message_memory
from serve.load_shedding import admit
from serve.models import ModelRepository
from serve.monitoring.request_log import RequestLog
from serve.protocol.statistics import statistics
from serve.request_context import RequestContext, in_flight, parse_grpc_timeout
from serve.security import OPEN_RPCS, ApiKeys
from serve.wire.connection_limits import MAX_HEAD_BYTES
from serve.wire.http2 import hpack
from serve.wire.http2.stream import Stream
from serve.wire.http2.streams import Streams

_OVERHEAD_BYTES = 1 << 16  # names and shapes around the tensors' own bytes
_CONTENT_TYPE = b"application/grpc"
_CONTENT_SUBTYPES = (b"", b"+proto")  # others are not protobuf


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    parse: Callable[[bytes], Any]
    answer: Callable[[Any, RpcCall], Awaitable[Any]] | None
    needs_key: bool = True
    stream: Open | None = None  # instead of `answer`, where there are several messages


@dataclass(frozen=True, slots=True)
class Head:
    """The meaning of a call's headers, the same for all calls with equal headers."""

    headers: dict[bytes, bytes]
    path: str = ""
    method: Method | None = None
    encoding: str = ""
    timeout_seconds: float = math.inf
    error: Callable[[], Exception] | None = None  # made anew for each call, since raising it adds a traceback
    status: int = HTTPStatus.OK  # another where the request is no gRPC at all


class RpcCall(RequestContext):
    def __init__(self, head: Head, stream: Stream, address: str) -> None:
        super().__init__(head.headers, head.path)
        self.head, self._stream, self._address = head, stream, address
        self.timeout_seconds = head.timeout_seconds
        self.task: asyncio.Task[None] | None = None  # the event loop holds no reference to it
        self.messages: MessageStream | None = None  # of a call with several
        self.answering: Answering | None = None

    @property
    def address(self) -> str:
        return self._address

    def is_disconnected(self) -> bool:
        return self._stream.cancelled


class Calls:
    """The application of the gRPC port."""

    def __init__(
        self,
        repository: ModelRepository,
        requests: RequestLog,
        headers: Sequence[tuple[str, str]],
        limits: BodyLimits,
        keys: ApiKeys | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._requests, self._keys, self._budget = requests, keys, budget or Budget()
        self._limits = limits._replace(size=limits.size + _OVERHEAD_BYTES)
        self._common_headers = hpack.encode_literals((name.encode(), value.encode()) for name, value in headers)
        self._bundle_headers: dict[Any, bytes] = {}
        self._running: set[RpcCall] = set()
        self._methods = _methods(Servicer(repository, requests), health.Health(repository))

    # Called by a connection

    def parse_head(self, request: dict[bytes, bytes] | None) -> Head:
        if request is None:
            return Head({}, error=partial(TooManyHeaders, f"the head is longer than {MAX_HEAD_BYTES} bytes"))
        path = request[b":path"].decode("latin-1")
        if (wrong_protocol := _check_protocol(request)) is not None:
            return Head(request, path, error=wrong_protocol, status=wrong_protocol().status)
        method = self._methods.get(path)
        try:
            if method is None:
                raise Unimplemented(_why_not(path))
            encoding = messages.encoding_name(request.get(b"grpc-encoding"))
            return Head(request, method.name, method, encoding, parse_grpc_timeout(request.get(b"grpc-timeout")))
        except (InvalidPayload, RequestError) as error:
            return Head(request, path, error=partial(type(error), *error.args))

    def on_headers(self, streams: Streams, stream: Stream) -> None:
        head: Head = stream.head
        stream.state = RpcCall(head, stream, streams.address)
        try:
            if self._keys is not None and (head.method is None or head.method.needs_key):
                self._keys.check(head.headers)
            if head.error is not None:
                raise head.error()
            if head.method is not None and head.method.stream is not None:
                self._open(streams, stream, head.method.stream)
        except (InvalidPayload, RequestError) as error:
            self._refuse(streams, stream, error)

    def on_data(self, streams: Streams, stream: Stream, size: int) -> None:
        if stream.state.messages is not None:
            self._receive(stream)
            return
        try:
            messages.check_size(stream.parts, stream.size, self._limits.size)
            self._budget.reserve(stream.state, messages.COPIES * size)
        except RequestError as error:
            self._refuse(streams, stream, error)

    def on_complete(self, streams: Streams, stream: Stream) -> None:
        call: RpcCall = stream.state
        if call.messages is not None:
            streams.wait_for_client(stream)
            self._receive(stream, ended=True)
            return
        self._running.add(call)
        if (method := call.head.method) is not None and method.name == "ModelInfer":
            call.protocol = "grpc"
            in_flight.count += 1  # now: the calls that are complete in one turn of the event loop run together
        call.task = asyncio.get_running_loop().create_task(self._answer(streams, stream, call))

    def on_timeout(self, streams: Streams, stream: Stream) -> None:
        self._refuse(streams, stream, RequestTimeout("the call did not arrive whole in time"))

    def on_cancel(self, stream: Stream) -> None:
        if stream.state.messages is None:
            self._fail(stream.state, ClientDisconnected("the client cancelled its call before it was whole"))
        else:
            stream.state.status = "CANCELLED"  # the only way to end a call that goes on
        self._finish(stream)

    # One call

    async def _answer(self, streams: Streams, stream: Stream, call: RpcCall) -> None:
        method = call.head.method
        assert method is not None and method.answer is not None
        try:
            try:
                answer = await method.answer(await self._read_message(stream, call, method), call)
                body = messages.frame_message(answer.SerializeToString())
            except Exception as error:
                trailers = self._fail(call, error) + self._identity(call)
                streams.answer(stream, b"", b"", messages.ANSWER + trailers)
            else:
                call.status = "OK"
                streams.answer(stream, messages.ANSWER, body, messages.OK + self._identity(call))
        finally:
            self._running.discard(call)
            self._finish(stream)

    async def _read_message(self, stream: Stream, call: RpcCall, method: Method) -> Any:
        parts = stream.parts
        data, compressed = messages.unframe_message(parts[0] if len(parts) == 1 else b"".join(parts), self._limits.size)
        stream.parts = []
        if compressed or len(data) > SMALL_BYTES:
            self._budget.check_address(call)
        if compressed:
            data = await messages.decompress(data, call.head.encoding, call, self._limits, self._budget)
        call.size = len(data)
        fields = open_inference.RAW_CONTENTS_FIELD, open_inference.TENSOR_FIELDS
        memory = message_memory(data, self._limits.fields, *fields)
        self._budget.reserve(call, memory)
        return await self._budget.parse(memory, _parse, method, data)

    # A call with several messages, in either direction

    def _open(self, streams: Streams, stream: Stream, open_call: Open) -> None:
        call: RpcCall = stream.state

        def end(error: Exception | None) -> None:
            if error is not None:
                self._refuse(streams, stream, error)
                return
            call.status = "OK"
            streams.answer(stream, b"", b"", self._head(call) + messages.OK + self._identity(call))
            self._finish(stream)

        call.messages = MessageStream(streams, stream, end)
        call.answering = open_call(call.messages)

    def _receive(self, stream: Stream, *, ended: bool = False) -> None:
        """Handle the messages that are complete."""
        call: RpcCall = stream.state
        received, answering, method = call.messages, call.answering, call.head.method
        assert received is not None and answering is not None and method is not None
        try:
            for data in received.receive():
                answering.on_message(_parse(method, data))
                if stream.state is None:  # the call has ended
                    return
            if ended:
                received.check_end()
                answering.on_end()
        except Exception as error:
            received.end(error)

    def _refuse(self, streams: Streams, stream: Stream, error: Exception) -> None:
        """End a call before it is complete."""
        call: RpcCall = stream.state
        stream.parts = []
        status, trailers = call.head.status, self._fail(call, error) + self._identity(call)
        if status == HTTPStatus.OK:
            streams.answer(stream, b"", b"", self._head(call) + trailers)
        else:
            call.status = status
            allowed = error.headers if isinstance(error, RequestError) else ()
            head = hpack.encode_status(status) + hpack.encode_literals(((b"content-type", b"text/plain"), *allowed))
            streams.answer(stream, head, str(error).encode() + b"\n", trailers)
        self._finish(stream)

    def _fail(self, call: RpcCall, error: Exception) -> bytes:
        """Return the status: of a client's mistake with its sentence, of ours opaque, with the traceback in the log."""
        refusal = self._requests.fail(call, error)
        self._budget.charge_refused(call, refusal)
        code, text = ("INTERNAL", INTERNAL) if refusal is None else (refusal.code, str(refusal))
        call.status = code
        return messages.status_headers(code, text)

    def _finish(self, stream: Stream) -> None:
        call: RpcCall = stream.state
        if call.answering is not None:
            call.answering.close()
            call.answering = call.messages = None  # which refer to the stream as well
        stream.state = None  # which refers to the stream: a reference cycle would wait for the garbage collector
        self._budget.release(call)
        self._requests.finish(call)

    @staticmethod
    def _head(call: RpcCall) -> bytes:
        """Return the headers of an answer that is only a status, unless they were sent before."""
        return b"" if call.messages is not None and call.messages.has_begun else messages.ANSWER

    def _identity(self, call: RpcCall) -> bytes:
        """Return the headers that name the request and the bundle that answered it."""
        encoded = self._common_headers + hpack.encode_literals(((b"x-request-id", call.id),))
        if (version := call.model_version) is None:
            return encoded
        if (bundle := self._bundle_headers.get(version.digest)) is None:
            bundle = self._bundle_headers[version.digest] = hpack.encode_literals(version.headers)
        return encoded + bundle


class Servicer:
    """The methods of the protocol, by the names that it gives them; refusals are raised."""

    def __init__(self, repository: ModelRepository, requests: RequestLog) -> None:
        self._repository, self._requests = repository, requests

    async def ModelInfer(self, message: Any, call: RpcCall) -> Any:  # noqa: N802
        version, payload = self._repository.find_version(message.model_name, message.model_version), Payload(message)
        if version.canary is not None and not message.model_version:
            version = await version.choose(payload, call.id)
        call.model_version = version
        admit(call, version)
        return await version.predict(call, payload)

    async def ServerLive(self, _message: Any, _call: RpcCall) -> Any:  # noqa: N802
        return open_inference.ServerLiveResponse(live=True)

    async def ServerReady(self, _message: Any, _call: RpcCall) -> Any:  # noqa: N802
        return open_inference.ServerReadyResponse(ready=self._repository.ready())

    async def ServerMetadata(self, _message: Any, _call: RpcCall) -> Any:  # noqa: N802
        return open_inference.ServerMetadataResponse(**self._repository.metadata())

    async def ModelReady(self, message: Any, _call: RpcCall) -> Any:  # noqa: N802
        self._repository.find_version(message.name, message.version)
        return open_inference.ModelReadyResponse(ready=self._repository.model_ready(message.name))

    async def ModelMetadata(self, message: Any, _call: RpcCall) -> Any:  # noqa: N802
        metadata = self._repository.model_metadata(message.name, message.version)
        return open_inference.ModelMetadataResponse(**metadata)

    async def ModelStatistics(self, message: Any, _call: RpcCall) -> Any:  # noqa: N802
        chosen = self._repository.find_versions(message.name, message.version)
        stats = statistics(await self._requests.metrics.of_service(), chosen)
        return open_inference.ModelStatisticsResponse(model_stats=stats)

    async def RepositoryIndex(self, message: Any, _call: RpcCall) -> Any:  # noqa: N802
        return open_inference.RepositoryIndexResponse(models=self._repository.index(ready=message.ready))

    async def RepositoryModelLoad(self, _message: Any, _call: RpcCall) -> Any:  # noqa: N802
        raise Unimplemented("models are loaded by the operator (`pipe deploy`), never by clients")

    RepositoryModelUnload = RepositoryModelLoad


def _methods(servicer: Servicer, health_service: health.Health) -> dict[str, Method]:
    """Return the methods by path."""
    parse_health = health.HealthCheckRequest.FromString
    listing = Method("List", health.HealthListRequest.FromString, health_service.list, needs_key=False)
    watch = Method("Watch", parse_health, None, needs_key=False, stream=partial(health.Watcher, health_service))
    methods = {
        f"/{health.SERVICE}/Check": Method("Check", parse_health, health_service.check, needs_key=False),
        f"/{health.SERVICE}/List": listing,
        f"/{health.SERVICE}/Watch": watch,
    }
    for name in open_inference.METHODS:
        parse = open_inference.message_class(f"{name}Request").FromString
        method = Method(name, parse, getattr(servicer, name), needs_key=name not in OPEN_RPCS)
        methods[f"/{open_inference.SERVICE}/{name}"] = method
    files = [open_inference.FILE, health.FILE, *_REFLECTION_FILES]
    for version in _REFLECTION_FILES:
        service = Reflection(version, files)
        converse = partial(Conversation, service)
        method = Method("ServerReflectionInfo", service.request_class.FromString, None, stream=converse)
        methods[f"/{version.package}.ServerReflection/{method.name}"] = method
    return methods


def _why_not(path: str) -> str:
    service, _, name = path.removeprefix("/").partition("/")
    if service == open_inference.SERVICE and name in open_inference.REFUSED:
        return f"{name}: {open_inference.REFUSED[name]}"
    return f"no method {path[:200]!r} here; there are those of {open_inference.SERVICE}"


def _parse(method: Method, data: bytes) -> Any:
    try:
        return method.parse(data)
    except DecodeError:
        raise InvalidPayload(f"the bytes are no message of {method.name}") from None


def _check_protocol(request: dict[bytes, bytes]) -> Callable[[], RequestError] | None:
    """Return what to raise for another client of HTTP/2."""
    if request[b":method"] != b"POST":
        return partial(MethodNotAllowed, "this port is for gRPC, whose calls are POST; HTTP/1.1 has another", "POST")
    kind, _, _ = request.get(b"content-type", b"").partition(b";")
    if not kind.startswith(_CONTENT_TYPE) or kind[len(_CONTENT_TYPE) :].strip() not in _CONTENT_SUBTYPES:
        return partial(UnsupportedMediaType, f"content-type: {kind[:80].decode('latin-1')!r} is no gRPC with protobuf")
    return None


_REFLECTION_TABLE = """
message ServerReflectionRequest
  string host = 1
  oneof:message_request string file_by_filename = 3
  oneof:message_request string file_containing_symbol = 4
  oneof:message_request ExtensionRequest file_containing_extension = 5
  oneof:message_request string all_extension_numbers_of_type = 6
  oneof:message_request string list_services = 7
message ExtensionRequest
  string containing_type = 1
  int32 extension_number = 2
message ServerReflectionResponse
  string valid_host = 1
  ServerReflectionRequest original_request = 2
  oneof:message_response FileDescriptorResponse file_descriptor_response = 4
  oneof:message_response ExtensionNumberResponse all_extension_numbers_response = 5
  oneof:message_response ListServiceResponse list_services_response = 6
  oneof:message_response ErrorResponse error_response = 7
message FileDescriptorResponse
  repeated bytes file_descriptor_proto = 1
message ExtensionNumberResponse
  string base_type_name = 1
  repeated int32 extension_number = 2
message ListServiceResponse
  repeated ServiceResponse service = 1
message ServiceResponse
  string name = 1
message ErrorResponse
  int32 error_code = 1
  string error_message = 2
service ServerReflection
  rpc ServerReflectionInfo stream ServerReflectionRequest stream ServerReflectionResponse
"""
# The two versions differ in their names only.
_REFLECTION_FILES = [
    ProtoFile(f"grpc/reflection/{version}/reflection.proto", f"grpc.reflection.{version}", _REFLECTION_TABLE)
    for version in ("v1", "v1alpha")
]
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # codes of gRPC


class Reflection:
    """One version of the reflection service, by which clients such as grpcurl learn the services and messages."""

    def __init__(self, version: ProtoFile, files: Sequence[ProtoFile]) -> None:
        """`files` are those that it describes; none of them imports another."""
        self.request_class = version.message_class("ServerReflectionRequest")
        self._response_class = version.message_class("ServerReflectionResponse")
        self._files = files
        self._services = [f"{file.package}.{name}" for file in files for name in file.descriptor.services_by_name]

    def respond(self, request: Any) -> Any:
        response = self._response_class(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        elif kind in ("file_by_filename", "file_containing_symbol"):
            name = getattr(request, kind)
            file = next((file for file in self._files if name == file.name or name in file.symbols), None)
            if file is None:
                response.error_response.error_code = _NOT_FOUND
                response.error_response.error_message = f"no file or symbol {name[:200]!r}"
            else:
                response.file_descriptor_response.file_descriptor_proto.append(file.serialized)
        else:
            response.error_response.error_code = _UNIMPLEMENTED
            response.error_response.error_message = "these files have no extensions (proto3)"
        return response


class Conversation:
    """One call of reflection: each message is answered when it arrives."""

    def __init__(self, reflection: Reflection, stream: MessageStream) -> None:
        self._reflection, self._stream = reflection, stream

    def on_message(self, message: Any) -> None:
        self._stream.send(self._reflection.respond(message))

    def on_end(self) -> None:
        self._stream.end(None)

    def close(self) -> None:
        """Hold nothing that has to be released."""
