"""What a gRPC client is told when its call is refused, or fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from google.protobuf.message import DecodeError
from grpc import StatusCode, aio
from grpc_interceptor.exception_to_status import AsyncExceptionToStatusInterceptor

from serve.app import INTERNAL
from serve.observer import READ
from serve.refusal import refusal_of
from serve.watch import request_id

_READ = {name.decode(): name for name in READ}

log = logging.getLogger(__name__)


class Garbage:
    """In place of a message whose bytes are none."""


class Refusals(AsyncExceptionToStatusInterceptor):
    """The client's mistakes with their sentence; ours opaque, with the traceback in the log."""

    def __init__(self, headers: Sequence[tuple[str, str]]) -> None:
        self._headers = headers

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await super().intercept_service(continuation, details)  # type: ignore[no-untyped-call]  # grpc_interceptor has none
        if handler is None or handler.request_deserializer is None:
            return handler
        return handler._replace(request_deserializer=_forgiving(handler.request_deserializer))

    async def intercept(self, method: Any, request_or_iterator: Any, context: Any, method_name: str) -> Any:
        name, garbage = method_name.rpartition("/")[2], isinstance(request_or_iterator, Garbage)
        if garbage or name != "ModelInfer":  # which tells of its bundle as well
            made = request_id(headers_of(context).get(b"x-request-id")).decode()
            context.set_trailing_metadata((*self._headers, ("x-request-id", made)))
        if garbage:
            await context.abort(StatusCode.INVALID_ARGUMENT, f"the bytes are no message of {name}")
        return await super().intercept(method, request_or_iterator, context, method_name)

    async def handle_exception(
        self,
        ex: Exception,
        request_or_iterator: Any,  # noqa: ARG002  # the signature is grpc_interceptor's
        context: Any,
        method_name: str,
    ) -> NoReturn:
        if isinstance(ex, aio.AbortError):
            raise ex
        status = status_of(ex)
        if status is StatusCode.INTERNAL and not method_name.endswith("/ModelInfer"):  # which has told of it
            log.error("%s failed", method_name, exc_info=ex)
        await context.abort(status, str(refusal_of(ex) or INTERNAL))
        raise ex  # never reached: abort raises


def headers_of(context: Any) -> dict[bytes, bytes]:
    """Those of a call's headers that are read here."""
    return {
        _READ[key]: value.encode() if isinstance(value, str) else value
        for key, value in context.invocation_metadata()
        if key in _READ
    }


def status_of(error: Exception) -> StatusCode:
    refusal = refusal_of(error)
    return StatusCode.INTERNAL if refusal is None else StatusCode[refusal.code]


@functools.cache
def _forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """grpc answers a message that cannot be parsed as if it were the server's fault, with a traceback in its log."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Garbage()

    return parsed
