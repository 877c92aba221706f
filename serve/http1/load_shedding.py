"""Requests that find no room are turned away on their heads alone while many are: it costs a fraction of an exchange.

The gate is open until a request is refused for want of room, and again when for a while none was. While it is shut,
each prediction that comes is asked here first whether there is room. What is said of it is what the application
would say, and it is counted and logged alike; whatever else may be wrong with a request is left to the application.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from pipeline.contract.errors import InvalidPayload
from serve.errors import Busy, Headers, Refusal
from serve.request_body import of_header
from serve.routes import find

if TYPE_CHECKING:
    from serve.models import OnnxPlane
    from serve.request_context import Watch
    from serve.request_log import Observer
    from serve.security import Keys


PROTOCOLS = {"predict": "v1", "infer": "v2"}
_SHUT_SECONDS = 1.0  # since the last refusal
_AT_ONCE = 256  # in one turn of the loop: it reads on as long as clients ask again, and nothing else is done meanwhile
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"
_KIND = b"content-type: application/json\r\n"


class Gate:
    def __init__(self, plane: OnnxPlane, observer: Observer, keys: Keys | None) -> None:
        self._plane, self._observer, self._keys = plane, observer, keys
        self.shut = False
        self._refused_at = 0.0
        self._turned = 0  # away, in this turn of the loop

    def refused(self) -> None:
        """A request met no room."""
        self.shut, self._refused_at = True, time.monotonic()

    def turned_away(self, scope: dict[str, Any], stamp: bytes, fed: int) -> bytes | None:
        """The whole answer, on a connection that goes on; None for a request that may come in.

        If that one came whole, in the `fed` bytes that were read with its head, it counts as waiting until the
        application has begun with it: of many that arrive in one turn of the loop each sees those before it.
        """
        if self._turned >= _AT_ONCE:
            return None
        headers = dict(scope["headers"])
        try:
            if self._keys is not None:
                self._keys.admit(headers)
            route = find(scope["path"], scope["method"])
            protocol = PROTOCOLS.get(route.kind, "")
            if not protocol or b"expect" in headers:
                return None
            served = self._plane.served(route.model, route.version)
            served.admit(of_header(headers))
        except Busy as busy:
            watch = self._observer.begin(headers, scope["path"])
            watch.served = served
            self._observer.asked(watch, protocol)
            return self._answer(watch, busy, stamp)
        except (Refusal, InvalidPayload):
            return None
        if time.monotonic() - self._refused_at > _SHUT_SECONDS:
            self.shut = False
        if int(headers.get(b"content-length", b"0")) < fed:
            served.coming += 1
            scope["coming"] = served
        return None

    def _next_turn(self) -> None:
        self._turned = 0

    def _answer(self, watch: Watch, busy: Busy, stamp: bytes) -> bytes:
        self.refused()
        if not self._turned:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._turned += 1
        self._observer.failed(watch, busy)
        watch.code = HTTPStatus.SERVICE_UNAVAILABLE
        self._observer.ended(watch)
        assert watch.served is not None
        headers: Headers = (*busy.headers, (b"x-request-id", watch.id), *watch.served.headers)
        lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        body = orjson.dumps({"error": str(busy)})
        return b"%b%b%b%bcontent-length: %d\r\n\r\n%b" % (_UNAVAILABLE, stamp, _KIND, lines, len(body), body)
