"""The gRPC side: one call from its name to its answer; every refusal a status with a sentence."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from pipeline.contract.errors import InvalidPayload
from serve.app import INTERNAL
from serve.canary import choose
from serve.errors import Gone, Refusal, TooManyHeaders, TooSlow, Unoffered, Unreadable, WrongMethod
from serve.grpc import messages
from serve.grpc.http2 import hpack
from serve.grpc.http2.headers import MAX_HEADER_LIST_BYTES
from serve.grpc.http2.stream import Stream
from serve.grpc.http2.streams import Streams
from serve.grpc.messages import Call, with_properties
from serve.models import OnnxPlane
from serve.request_body import Room, of_call
from serve.request_context import Watch
from serve.request_log import Observer
from serve.security import OPEN_RPCS, Keys

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_OVERHEAD_BYTES = 1 << 16  # names and shapes around the tensors' own bytes
_ROOM_BYTES = 16 << 20  # what one may take: unlike HTTP's, a message of 20 KB comes in pieces already
_TYPE = b"application/grpc"
_TYPES = (b"", b"+proto")  # behind it; others would be no protobuf

Answered = Callable[[Any, "Asked"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    parse: Callable[[bytes], Any]
    answered: Answered
    open: bool  # to who has no key


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a call means: the same for all calls that begin with the same."""

    headers: dict[bytes, bytes]
    path: str = ""
    method: Method | None = None
    coding: str = ""
    timeout_seconds: float = math.inf
    wrong: Callable[[], Exception] | None = None  # made anew for each call: who raises it leaves marks on it
    status: int = HTTPStatus.OK  # another where it is no gRPC at all


@dataclass(slots=True, eq=False)
class Asked:
    """One call as the methods see it."""

    head: Head
    watch: Watch
    gone: Callable[[], bool]
    held: int = 0  # bytes of its body that take room
    task: asyncio.Task[None] | None = None  # the loop itself holds no reference to it


class Calls:
    """Of every method of the protocol."""

    def __init__(
        self,
        plane: OnnxPlane,
        observer: Observer,
        headers: Sequence[tuple[str, str]],
        most_bytes: int,
        keys: Keys | None = None,
    ) -> None:
        self._observer, self._keys, self._room = observer, keys, Room()
        self._most = most_bytes + _OVERHEAD_BYTES
        self._stamp = hpack.encode_literals((name.encode(), value.encode()) for name, value in headers)
        self._bundles: dict[str, bytes] = {}
        self._running: set[Asked] = set()
        servicer = Servicer(plane, observer)
        self._methods = {
            f"/{_SERVICE.full_name}/{method.name}": Method(
                method.name,
                GetMessageClass(method.input_type).FromString,
                getattr(servicer, method.name),
                method.name in OPEN_RPCS,
            )
            for method in _SERVICE.methods
        }

    # What a connection tells

    def parse_head(self, request: dict[bytes, bytes] | None) -> Head:
        if request is None:
            return Head({}, wrong=partial(TooManyHeaders, f"the head is longer than {MAX_HEADER_LIST_BYTES} bytes"))
        path = request[b":path"].decode("latin-1")
        if (wrong := _no_grpc(request)) is not None:
            return Head(request, path, wrong=wrong, status=wrong().status)
        method = self._methods.get(path)
        try:
            if method is None:
                raise Unoffered(f"no method {path[:200]!r} here; there are those of {_SERVICE.full_name}")
            coding = messages.coding_of(request.get(b"grpc-encoding"))
            return Head(request, method.name, method, coding, of_call(request.get(b"grpc-timeout")))
        except (InvalidPayload, Refusal) as error:
            return Head(request, path, wrong=partial(type(error), *error.args))

    def on_headers(self, streams: Streams, stream: Stream) -> None:
        head: Head = stream.head
        stream.state = Asked(head, self._observer.begin(head.headers, head.path), stream.is_cancelled)
        try:
            if self._keys is not None and not (head.method is not None and head.method.open):
                self._keys.admit(head.headers)
            if head.wrong is not None:
                raise head.wrong()
        except (InvalidPayload, Refusal) as error:
            self._refuse(streams, stream, error)

    def on_data(self, streams: Streams, stream: Stream, size: int) -> None:
        try:
            messages.check_size(stream.parts, stream.size, self._most)
            self._room.take(size, max(self._most, _ROOM_BYTES))
            stream.state.held += size
        except Refusal as error:
            self._refuse(streams, stream, error)

    def on_complete(self, streams: Streams, stream: Stream) -> None:
        asked = stream.state
        stream.running = True
        self._running.add(asked)
        asked.task = asyncio.get_running_loop().create_task(self._answer(streams, stream, asked))

    def on_timeout(self, streams: Streams, stream: Stream) -> None:
        self._refuse(streams, stream, TooSlow("the call did not arrive whole in time"))

    def on_cancel(self, stream: Stream) -> None:
        self._failed(stream.state, Gone("the client took its call back before it was whole"))
        self._ended(stream)

    # One call

    async def _answer(self, streams: Streams, stream: Stream, asked: Asked) -> None:
        watch, method = asked.watch, asked.head.method
        assert method is not None
        try:
            try:
                answer = await method.answered(await self._message(stream, asked, method), asked)
                body = messages.wrap(answer.SerializeToString())
            except Exception as error:
                streams.answer(stream, b"", b"", messages.ANSWER + self._failed(asked, error) + self._identity(watch))
            else:
                watch.code = "OK"
                streams.answer(stream, messages.ANSWER, body, messages.OK + self._identity(watch))
        finally:
            self._running.discard(asked)
            self._ended(stream)

    async def _message(self, stream: Stream, asked: Asked, method: Method) -> Any:
        parts = stream.parts
        data, compressed = messages.unwrap(parts[0] if len(parts) == 1 else b"".join(parts), self._most)
        stream.parts = []
        if compressed:
            data = await messages.inflated(data, asked.head.coding, self._most)
        try:
            return method.parse(data)
        except DecodeError:
            raise InvalidPayload(f"the bytes are no message of {method.name}") from None

    def _refuse(self, streams: Streams, stream: Stream, error: Exception) -> None:
        """Before it is whole."""
        asked: Asked = stream.state
        stream.parts = []
        status, trailers = asked.head.status, self._failed(asked, error) + self._identity(asked.watch)
        if status == HTTPStatus.OK:
            streams.answer(stream, b"", b"", messages.ANSWER + trailers)
        else:
            asked.watch.code = status
            allowed = error.headers if isinstance(error, Refusal) else ()
            head = hpack.encode_status(status) + hpack.encode_literals(((b"content-type", b"text/plain"), *allowed))
            streams.answer(stream, head, str(error).encode() + b"\n", trailers)
        self._ended(stream)

    def _failed(self, asked: Asked, error: Exception) -> bytes:
        """The client's mistakes with their sentence; ours opaque, with the traceback in the log."""
        refusal = self._observer.failed(asked.watch, error)
        code, text = ("INTERNAL", INTERNAL) if refusal is None else (refusal.code, str(refusal))
        asked.watch.code = code
        return messages.failure(code, text)

    def _ended(self, stream: Stream) -> None:
        asked: Asked = stream.state
        stream.state = None  # which refers to the stream: a circle would wait for the garbage collector
        self._room.held -= asked.held
        self._observer.ended(asked.watch)

    def _identity(self, watch: Watch) -> bytes:
        """Which request this was, and which bundle answered it."""
        return self._stamp + hpack.encode_literals(((b"x-request-id", watch.id),)) + self._bundle(watch)

    def _bundle(self, watch: Watch) -> bytes:
        if watch.served is None:
            return b""
        digest = watch.served.bundle.digest
        if (found := self._bundles.get(digest)) is None:
            found = self._bundles[digest] = hpack.encode_literals(watch.served.headers)
        return found


class Servicer:
    """What each method answers; its refusals are raised."""

    def __init__(self, plane: OnnxPlane, observer: Observer) -> None:
        self._plane, self._observer = plane, observer

    async def ModelInfer(self, message: Any, asked: Asked) -> Any:  # noqa: N802  # the protocol's name
        watch, timeout_seconds = asked.watch, asked.head.timeout_seconds
        self._observer.asked(watch, "grpc")
        served, call = self._plane.served(message.model_name, message.model_version), Call(message)
        if served.canary is not None and not message.model_version:
            served = await choose(served, call, watch.id)
        watch.served = served
        served.admit(timeout_seconds)
        return await served.answer(call, timeout_seconds, asked.gone, watch)

    async def ServerLive(self, _message: Any, _asked: Asked) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _message: Any, _asked: Asked) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=await self._plane.ready())

    async def ServerMetadata(self, _message: Any, _asked: Asked) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(**self._plane.metadata())

    async def ModelReady(self, message: Any, _asked: Asked) -> Any:  # noqa: N802
        self._plane.served(message.name, message.version)
        return pb.ModelReadyResponse(ready=await self._plane.model_ready(message.name))

    async def ModelMetadata(self, message: Any, _asked: Asked) -> Any:  # noqa: N802
        found = await self._plane.model_metadata(message.name, message.version)
        properties = found.pop("properties")
        return with_properties(pb.ModelMetadataResponse(**found), properties)

    async def RepositoryModelLoad(self, _message: Any, _asked: Asked) -> Any:  # noqa: N802
        raise Unoffered("models are loaded by who runs this service (`pipe deploy`), never by its clients")

    RepositoryModelUnload = RepositoryModelLoad


def _no_grpc(request: dict[bytes, bytes]) -> Callable[[], Refusal] | None:
    """What another client of HTTP/2 is told."""
    if request[b":method"] != b"POST":
        return partial(WrongMethod, "this port speaks gRPC, whose calls are POST; HTTP/1.1 has another port", "POST")
    kind, _, _ = request.get(b"content-type", b"").partition(b";")
    if not kind.startswith(_TYPE) or kind[len(_TYPE) :].strip() not in _TYPES:
        return partial(Unreadable, f"content-type: {kind[:80].decode('latin-1')!r} is no gRPC with protobuf")
    return None
