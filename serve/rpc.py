"""The gRPC side: one call from its name to its answer; every refusal a status with a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode, aio
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from pipeline.spec.errors import InvalidPayload
from serve.app import INTERNAL
from serve.canary import choose
from serve.deadline import of_call
from serve.keys import OPEN_RPCS, Keys
from serve.message import Call, with_properties
from serve.model import OnnxPlane
from serve.observer import Observer
from serve.refusal import Unoffered
from serve.watch import Watch

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_HOLD_SECONDS = 0.05  # answers wait at the end of a service, before and after clients are told of it
_OVERHEAD_BYTES = 1 << 16  # names and shapes around the tensors' own bytes

Answered = Callable[[Any, Any, Watch], Awaitable[Any]]


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Of every method of the protocol. Interceptors would cost a small model's call more than all the rest."""

    def __init__(
        self, plane: OnnxPlane, observer: Observer, headers: Sequence[tuple[str, str]], keys: Keys | None = None
    ) -> None:
        self._plane, self._observer, self._keys = plane, observer, keys
        self.headers = tuple(headers)
        self.released = asyncio.Event()  # until then, whoever asks a service that drains waits for the answer
        servicer = Servicer(plane, observer)
        self._handlers = {
            f"/{_SERVICE.full_name}/{method.name}": self._handler(method, getattr(servicer, method.name))
            for method in _SERVICE.methods
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    def _handler(self, method: Any, answered: Answered) -> Any:
        name, parse = method.name, GetMessageClass(method.input_type).FromString
        keys = None if name in OPEN_RPCS else self._keys

        async def handle(data: bytes, context: Any) -> Any:
            headers = headers_of(context)
            watch = self._observer.begin(headers, name)
            try:
                status, answer = StatusCode.OK, b""
                try:
                    if keys is not None:
                        keys.admit(headers)
                    answer = (await answered(_read(parse, data, name), context, watch)).SerializeToString()
                except Exception as error:
                    status, text = self._failed(watch, error)
                watch.code = status.name
                if self._plane.draining:
                    await self.released.wait()
                # Behind the answer: before it, it would be a write of its own.
                context.set_trailing_metadata(self._identity(watch))
                if status is not StatusCode.OK:
                    await context.abort(status, text)
                return answer
            finally:
                self._observer.ended(watch)

        return grpc.unary_unary_rpc_method_handler(handle)

    def _failed(self, watch: Watch, error: Exception) -> tuple[StatusCode, str]:
        """The client's mistakes with their sentence; ours opaque, with the traceback in the log."""
        refusal = self._observer.failed(watch, error)
        return (StatusCode.INTERNAL, INTERNAL) if refusal is None else (StatusCode[refusal.code], str(refusal))

    def _identity(self, watch: Watch) -> tuple[tuple[str, str], ...]:
        """Which request this was, and which bundle answered it."""
        bundle = () if watch.served is None else watch.served.trailers
        return (*self.headers, ("x-request-id", watch.id.decode()), *bundle)


class Servicer:
    """What each method answers; its refusals are raised."""

    def __init__(self, plane: OnnxPlane, observer: Observer) -> None:
        self._plane, self._observer = plane, observer

    async def ModelInfer(self, message: Any, context: Any, watch: Watch) -> Any:  # noqa: N802  # the protocol's name
        self._observer.asked(watch, "grpc")
        served, call = self._plane.served(message.model_name, message.model_version), Call(message)
        if served.canary is not None and not message.model_version:
            served = await choose(served, call, watch.id)
        watch.served = served
        timeout_seconds = of_call(context.time_remaining())
        served.admit(timeout_seconds)
        return await served.answer(call, timeout_seconds, watch=watch)

    async def ServerLive(self, _message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=await self._plane.ready())

    async def ServerMetadata(self, _message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(**self._plane.metadata())

    async def ModelReady(self, message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        self._plane.served(message.name, message.version)
        return pb.ModelReadyResponse(ready=await self._plane.model_ready(message.name))

    async def ModelMetadata(self, message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        found = await self._plane.model_metadata(message.name, message.version)
        properties = found.pop("properties")
        return with_properties(pb.ModelMetadataResponse(**found), properties)

    async def RepositoryModelLoad(self, _message: Any, _context: Any, _watch: Watch) -> Any:  # noqa: N802
        raise Unoffered("models are loaded by who runs this service (`pipe deploy`), never by its clients")

    RepositoryModelUnload = RepositoryModelLoad


def headers_of(context: Any) -> dict[bytes, bytes]:
    """What a call carries beside its message, as HTTP would carry it."""
    return {
        key.encode(): value if isinstance(value, bytes) else value.encode()
        for key, value in context.invocation_metadata() or ()
    }


def _read(parse: Callable[[bytes], Any], data: bytes, name: str) -> Any:
    """grpc would answer bytes that are no message as if it were the server's fault, with a traceback in its log."""
    try:
        return parse(data)
    except DecodeError:
        raise InvalidPayload(f"the bytes are no message of {name}") from None


def build(calls: Calls, max_body_bytes: int) -> Any:
    """A gRPC server without a port."""
    return aio.server(
        ThreadPoolExecutor(1),  # grpc wants one for handlers that are not coroutines; we have none
        handlers=(calls,),
        options=[
            ("grpc.max_receive_message_length", max_body_bytes + _OVERHEAD_BYTES),
            ("grpc.max_send_message_length", -1),
        ],
    )


async def retire(server: Any, calls: Calls, grace_seconds: float) -> None:
    """End so that nobody's next call meets the end.

    gRPC fails a call that arrives after its server was told to stop and before the client was told of it. So
    answers are held from the beginning of the drain; whoever waits for one sends nothing meanwhile, and hears
    first that this connection is closing, then the answer.
    """
    await asyncio.sleep(_HOLD_SECONDS)
    ended = asyncio.ensure_future(server.stop(grace=grace_seconds))
    await asyncio.sleep(_HOLD_SECONDS)
    calls.released.set()
    await ended
