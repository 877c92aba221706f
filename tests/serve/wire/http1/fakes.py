"""A connection without a network: a transport that keeps what is written, and a small application."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from serve.monitoring.logs import ConnectionLog
from serve.wire.connection_limits import BufferLimit, PeerLimits
from serve.wire.http1 import Application as AnyApplication
from serve.wire.http1 import Connection, Host, Request
from serve.wire.request import Disconnected

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) ")


class FakeTransport:
    """What uvloop's transport does for a connection; `unsent` grows instead of `written` while `blocked`."""

    def __init__(self, peer: str = "192.0.2.1") -> None:
        self.peer, self.connection = peer, cast("Connection", None)
        self.written, self.unsent = bytearray(), bytearray()
        self.blocked = self.closing = self.reading_paused = self.lost = False
        self.high_water = 64 << 10

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in STATUS_LINE.findall(self.written)]

    def get_extra_info(self, name: str) -> Any:
        return (self.peer, 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high_water = high

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def write(self, data: bytes) -> None:
        if self.closing:
            return
        (self.unsent if self.blocked else self.written).extend(data)
        if len(self.unsent) > self.high_water:
            self.connection.pause_writing()

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.lost = True
        self.connection.connection_lost(None)


class Application:
    """Answers with the length of the body; /refused is refused at once, /waits until `go_on` is set."""

    request_class = Request

    def __init__(self, answer: bytes | None = None) -> None:
        self.requests: list[Request] = []
        self.go_on = asyncio.Event()
        self._answer = answer

    def begin(self, request: Request) -> Any:
        self.requests.append(request)
        if request.path == "/refused":
            request.respond_now(503, (), b"busy")
            return None
        return self.answer(request)

    async def answer(self, request: Request) -> None:
        size, more = 0, True
        while more:
            try:
                piece, more = await request.receive()
            except Disconnected:
                return
            size += len(piece)
        if request.path == "/waits":
            await self.go_on.wait()
        await request.respond(200, (), b"%d" % size if self._answer is None else self._answer)


def make_host(
    app: AnyApplication[Any],
    *,
    maximum: int = 1000,
    per_peer: int = 1000,
    received: BufferLimit | None = None,
    unsent: BufferLimit | None = None,
) -> Host:
    """Return what a listener shares among its connections."""
    limits = PeerLimits(per_peer), received or BufferLimit(), unsent or BufferLimit()
    return Host(app, ConnectionLog(), maximum, *limits, connections=set(), orphans=set())


def connect(app: AnyApplication[Any], transport: FakeTransport, host: Host | None = None) -> Connection:
    """Return a connection of a listener; each has one of its own by default."""
    connection = Connection(host or make_host(app))
    transport.connection = connection
    connection.connection_made(cast("Any", transport))
    return connection
