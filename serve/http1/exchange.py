"""One request and its answer, as ASGI sees them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from serve.logs import told
from serve.request_context import request_id

if TYPE_CHECKING:
    from serve.http1.connection import Connection


_HIGH_WATER_BYTES = 256 << 10  # of a body are handed over at once; below it the application is not woken
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_CONTINUE = _STATUS[100] + b"\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"

_stamped: list[Any] = [None, b""]  # the last list of headers, and it as bytes

log = logging.getLogger(__name__)

App = Callable[..., Coroutine[Any, Any, None]]


class Exchange:
    __slots__ = (
        "_chunked",
        "_chunks",
        "_connection",
        "_continue",
        "_head",
        "_left",
        "_more",
        "_size",
        "_waiter",
        "gone",
        "half_closed",
        "keep_alive",
        "scope",
        "task",
    )

    begun = 0  # of all connections, and not answered yet

    def __init__(self, connection: Connection, scope: dict[str, Any], keep_alive: bool) -> None:
        self._connection, self.scope, self.keep_alive = connection, scope, keep_alive
        self.task: asyncio.Task[None] | None = None
        self.gone = False  # the client is, and nobody waits for an answer
        self.half_closed = False  # it sends no more; it may be gone, or still listen
        self._chunks: list[bytes] = []
        self._size = 0
        self._more = True
        self._waiter: asyncio.Future[None] | None = None
        self._continue = False
        self._head: bytes | None = b""  # None: the answer is complete
        self._left = -1  # bytes of the answer still to come, or 0 where nobody knows; -1 before it began
        self._chunked = False  # nobody knows how long it will be
        for name, value in scope["headers"]:
            if name == b"expect" and value.lower() == b"100-continue":
                self._continue = True
        scope["left"], scope["alone"] = self.left, self.alone

    def left(self) -> bool:
        """Asked before a request that had to wait is computed: for a client that is gone it is not.

        One that closed its whole connection and one that only closed it for sending look the same, until something is
        written: the first answers that with a reset. asyncio does not tell of it, for it reads no more.
        """
        if self.half_closed and not self.gone:
            sock = self._connection.transport.get_extra_info("socket")
            self.gone = sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return self.gone

    def probe(self) -> None:
        """Write what a client may be told at any time before its answer, and HTTP/1.0 does not know."""
        transport = self._connection.transport
        if self._left < 0 and not self.gone and self.scope.get("http_version") == "1.1" and not transport.is_closing():
            transport.write(_CONTINUE)

    def alone(self) -> bool:
        """Nobody else asks at the moment, not even who was heard in this turn of the loop and has not begun."""
        return Exchange.begun == 1

    @property
    def waiting_for_body(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    @property
    def answered(self) -> bool:
        return self._head is None

    # From the connection

    def feed(self, body: bytes) -> None:
        if self._head is None:  # answered already: read only to reach the next request
            return
        self._chunks.append(body)
        self._size += len(body)
        if self._size >= _HIGH_WATER_BYTES:
            if self._waiter is None:
                self._connection.hold()
            self._wake()

    def complete(self) -> None:
        self._more = False
        self._wake()

    def lose(self) -> None:
        self.gone = True
        self._wake()

    def start(self, app: App) -> None:
        Exchange.begun += 1
        self.task = self._connection.loop.create_task(self.run(app))

    async def run(self, app: App) -> None:
        try:
            await app(self.scope, self.receive, self.send)
            if self._head is not None and not self.gone:
                raise RuntimeError("the application ended without an answer")
        except Exception:  # the application answers for its own errors, so this is ours; never silent, never a leak
            made = request_id(dict(self.scope["headers"]).get(b"x-request-id"))
            log.exception("request failed", extra=told(request_id=made.decode(), path=self.scope["path"]))
            if self._left < 0 and not self.gone:
                stamp = b"%bx-request-id: %b\r\n" % (self._connection.stamp, made)
                self._connection.transport.write(plain(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", stamp))
            self._head, self.keep_alive = None, False
        finally:
            Exchange.begun -= 1
            self._connection.finished(self)
            self.scope = {}  # which refers to this exchange: a circle would wait for the garbage collector

    # ASGI

    async def receive(self) -> dict[str, Any]:
        if self._continue:
            self._continue = False
            if self._more and not self.gone and self._left < 0:
                self._connection.transport.write(_CONTINUE)
        while self._more and self._size < _HIGH_WATER_BYTES and not self.gone and self._head is not None:
            self._connection.wait_for_body()
            self._waiter = self._connection.loop.create_future()
            await self._waiter
            self._waiter = None
        if self.gone or self._head is None:
            return {"type": "http.disconnect"}
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks, self._size = [], 0
        return {"type": "http.request", "body": body, "more_body": self._more}

    async def send(self, message: dict[str, Any]) -> None:
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        connection, body = self._connection, message.get("body", b"")
        if connection.outflow.paused:
            await connection.outflow.drained(connection.transport)
        more = message.get("more_body", False)
        if self._chunked and self._head is not None:
            self._write_chunk(body, more=more)
            return
        if self._head is None or self._left < 0 or len(body) > self._left:
            raise RuntimeError("an answer that does not fit its content-length")
        self._left -= len(body)
        if self.scope["method"] == "HEAD":
            body, self._left = b"", 0
        if self._head or body:
            connection.transport.write(self._head + body)
        self._head = b"" if more else None
        if not more and self._left:
            raise RuntimeError("an answer shorter than its content-length")

    def _write_chunk(self, body: bytes, *, more: bool) -> None:
        """HTTP/1.0 knows no chunks: there the end of the connection is that of the answer."""
        framed = self.scope["http_version"] == "1.1"
        if framed:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        assert self._head is not None
        if self._head or body:
            self._connection.transport.write(self._head + body)
        self._head = b"" if more else None

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Written together with the body's first part."""
        if self._left >= 0:
            raise RuntimeError("a second answer to one request")
        stamp = self._connection.stamp
        lines = [_STATUS[status], stamp]
        length = b""
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if not length:
            self._chunked, length = True, b"0"
            if self.scope["http_version"] == "1.1":
                lines.append(_CHUNKED)
            else:
                self.keep_alive = False
        if not self.keep_alive:
            lines.append(_CLOSE)
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) - 1 + stamp.count(b"\n"):
            raise RuntimeError("a header with a line break in it")
        self._left, self._head = int(length), head

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def stamp_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """As they are sent. uvicorn makes a new list when the second changes, so that the same one says the same."""
    if _stamped[0] is not headers:
        _stamped[:] = headers, b"".join([b"%b: %b\r\n" % pair for pair in headers])
    found: bytes = _stamped[1]
    return found


def refusal(status: HTTPStatus, text: str, stamp: bytes) -> bytes:
    """To a request that does not reach the application."""
    made = request_id(None)
    log.info("refused", extra=told(status=int(status), reason=text, request_id=made.decode()))
    return plain(status, text, b"%bx-request-id: %b\r\n" % (stamp, made))


def plain(status: HTTPStatus, text: str, stamp: bytes) -> bytes:
    """A whole answer that ends the connection."""
    body = orjson.dumps({"error": text})
    kind = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    return _STATUS[status] + stamp + kind + _CLOSE + b"\r\n" + body


def connection_scope(transport: asyncio.Transport) -> dict[str, Any]:
    """What all requests of a connection have in common."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": _place(transport.get_extra_info("sockname")),
        "client": _place(transport.get_extra_info("peername")),
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "root_path": "",
    }


def _place(address: Any) -> tuple[str, int] | None:
    return (address[0], address[1]) if isinstance(address, tuple) else None
