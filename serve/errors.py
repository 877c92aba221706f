"""Why a request gets no prediction, in the words of HTTP and of gRPC alike."""

from __future__ import annotations

import math
from http import HTTPStatus

from pipeline.contract.errors import InvalidPayload

Headers = tuple[tuple[bytes, bytes], ...]

_LONGEST = 500  # characters of a sentence


class Refusal(Exception):
    """A sentence for the client; `code` is a name of gRPC's, `reason` a label of the metrics."""

    status: int = HTTPStatus.BAD_REQUEST
    code = "INVALID_ARGUMENT"
    reason = "invalid"
    headers: Headers = ()

    def __str__(self) -> str:
        """Bounded: it may hold a name that a client made up, and gRPC sends it in a header."""
        text = super().__str__()
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Unknown(Refusal):
    """No such path, model or version."""

    status, code, reason = HTTPStatus.NOT_FOUND, "NOT_FOUND", "unknown"


class Unoffered(Refusal):
    """gRPC has it; this service does not."""

    code, reason = "UNIMPLEMENTED", "method"


class Unauthorized(Refusal):
    """No API key, or none that is known."""

    status, code, reason = HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", "unauthorized"

    def __init__(self, text: str, *, browser: bool = False) -> None:
        super().__init__(text)
        scheme = b"Basic" if browser else b"Bearer"  # a browser then asks the person before it
        self.headers = ((b"www-authenticate", scheme + b' realm="pipe", charset="UTF-8"'),)


class WrongMethod(Refusal):
    status, code, reason = HTTPStatus.METHOD_NOT_ALLOWED, "UNIMPLEMENTED", "method"

    def __init__(self, text: str, allowed: str) -> None:
        super().__init__(text)
        self.headers = ((b"allow", allowed.encode()),)


class Conflict(Refusal):
    """What is asked does not go with how things stand."""

    status, code, reason = HTTPStatus.CONFLICT, "FAILED_PRECONDITION", "conflict"


class Unreadable(Refusal):
    """A type or coding of the body that is not read here."""

    status, reason = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "media"

    def __init__(self, text: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(text)
        self.headers = headers


class TooLong(Refusal):
    """A URL nobody needs."""

    status, reason = HTTPStatus.REQUEST_URI_TOO_LONG, "head"


class TooManyHeaders(Refusal):
    """More headers, or longer ones, than a request needs."""

    status, code, reason = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "RESOURCE_EXHAUSTED", "head"


class TooSlow(Refusal):
    """The request did not arrive in time."""

    status, code, reason = HTTPStatus.REQUEST_TIMEOUT, "CANCELLED", "slow"


class TooLarge(Refusal):
    status, code, reason = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RESOURCE_EXHAUSTED", "size"
    more = False  # of the body is still on its way


class Busy(Refusal):
    """Nothing is wrong with the request, but there is no room for it now."""

    status, code, reason = HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE", "busy"

    def __init__(self, text: str, seconds: float = 0.0) -> None:
        """`seconds` until there may be room."""
        super().__init__(text)
        self.headers = ((b"retry-after", b"%d" % min(60, max(1, math.ceil(seconds)))),)


class Expired(Refusal):
    """Its deadline passed before it was computed."""

    status, code, reason = HTTPStatus.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED", "expired"


class Gone(Refusal):
    """The client left: the answer is for the metrics and the log."""

    status, code, reason = 499, "CANCELLED", "gone"  # the number nginx has for it


def refusal_of(error: Exception) -> Refusal | None:
    """None where it is our own fault."""
    if isinstance(error, InvalidPayload):
        return Refusal(str(error))
    return error if isinstance(error, Refusal) else None
