"""Errors of requests, each with its HTTP status, its gRPC code and its label in the metrics."""

from __future__ import annotations

import math
from http import HTTPStatus

from pipeline.system.errors import InvalidPayload
from serve.wire.request import Disconnected

Headers = tuple[tuple[bytes, bytes], ...]

INTERNAL = "internal error; the server's log has the details"
_MAX_TEXT = 500  # characters


class RequestError(Exception):
    """An error with a sentence for the client; `code` is the name of a gRPC code, `reason` a label of the metrics."""

    status: int = HTTPStatus.BAD_REQUEST
    code = "INVALID_ARGUMENT"
    reason = "invalid"
    headers: Headers = ()

    def __str__(self) -> str:
        """Return a bounded text: it may contain a name from the client, and gRPC sends it in a header."""
        text = super().__str__()
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


class NotFound(RequestError):
    """No such path, model or version."""

    status, code, reason = HTTPStatus.NOT_FOUND, "NOT_FOUND", "unknown"


class Unimplemented(RequestError):
    """A method of gRPC that this service does not implement."""

    code, reason = "UNIMPLEMENTED", "method"


class Unauthorized(RequestError):
    """No API key, or none that is known."""

    status, code, reason = HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", "unauthorized"

    def __init__(self, text: str, *, browser: bool = False) -> None:
        super().__init__(text)
        scheme = b"Basic" if browser else b"Bearer"  # a browser then shows a password dialog
        self.headers = ((b"www-authenticate", scheme + b' realm="pipe", charset="UTF-8"'),)


class MethodNotAllowed(RequestError):
    status, code, reason = HTTPStatus.METHOD_NOT_ALLOWED, "UNIMPLEMENTED", "method"

    def __init__(self, text: str, allowed: str) -> None:
        super().__init__(text)
        self.headers = ((b"allow", allowed.encode()),)


class UnsupportedMediaType(RequestError):
    """A content type or encoding of the body that is not supported."""

    status, reason = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "media"

    def __init__(self, text: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(text)
        self.headers = headers


class TooManyHeaders(RequestError):
    """More headers, or longer ones, than a request needs."""

    status, code, reason = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "RESOURCE_EXHAUSTED", "head"


class RequestTimeout(RequestError):
    """The request did not arrive in time."""

    status, code, reason = HTTPStatus.REQUEST_TIMEOUT, "CANCELLED", "slow"


class TooLarge(RequestError):
    status, code, reason = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RESOURCE_EXHAUSTED", "size"
    more = False  # of the body is still to come


class Busy(RequestError):
    """The service has no capacity for the request now."""

    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    code, reason = "UNAVAILABLE", "busy"

    def __init__(self, text: str, seconds: float = 0.0) -> None:
        """`seconds`: until there may be capacity."""
        super().__init__(text)
        self.headers = ((b"retry-after", b"%d" % min(60, max(1, math.ceil(seconds)))),)


class TooManyRefused(Busy):
    """The client's address has had too many bodies refused."""

    status, code, reason = HTTPStatus.TOO_MANY_REQUESTS, "RESOURCE_EXHAUSTED", "address"


class DeadlineExceeded(RequestError):
    """The deadline passed before the request was computed."""

    status, code, reason = HTTPStatus.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED", "expired"


class ClientDisconnected(RequestError):
    """The client disconnected; the status is for the metrics and the log."""

    status, code, reason = 499, "CANCELLED", "gone"  # the number nginx has for it


def as_request_error(error: Exception) -> RequestError | None:
    """Return None for a fault of the service."""
    if isinstance(error, InvalidPayload):
        return RequestError(str(error))
    if isinstance(error, Disconnected):
        return ClientDisconnected(str(error))
    return error if isinstance(error, RequestError) else None
