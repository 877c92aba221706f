"""A connection without a network, and a small application."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from serve.monitoring.logs import ConnectionLog
from serve.wire.connection_limits import BufferLimit, PeerLimits
from serve.wire.http1 import Application as AnyApplication
from serve.wire.http1 import Connection, Host, Request
from serve.wire.request import Disconnected
from tests.serve.wire.transport import FakeTransport


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
    """Return the state that the connections of a listener share."""
    limits = PeerLimits(2 * per_peer), received or BufferLimit(), unsent or BufferLimit()
    return Host(app, ConnectionLog(), maximum, *limits, connections=set(), orphans=set())


def connect(app: AnyApplication[Any], transport: FakeTransport, host: Host | None = None) -> Connection:
    """Return a connection of a listener, by default of its own one."""
    connection = Connection(host or make_host(app))
    transport.connection = connection
    connection.connection_made(cast("Any", transport))
    return connection
