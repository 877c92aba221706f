"""An HTTP/2 listener on a real port, and a client that sends and receives single frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop

from serve.monitoring.logs import ConnectionLog
from serve.wire.http2 import frames
from serve.wire.http2.frames import ACK, FRAME_HEADER, ErrorCode, Frame
from serve.wire.listeners import Http2Listener
from tests.serve.wire.http2.frames import CLIENT_PREFACE, EchoApplication, bodies, request

HANG_TIMEOUT_SECONDS = 10.0


class Client:
    """Sends and receives frames over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))
        await self.writer.drain()

    async def receive(self) -> Frame:
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack(await self.reader.readexactly(9))
        return kind, flags, stream_id, await self.reader.readexactly(high << 8 | low)

    async def receive_until(self, kind: int, flags: int = 0) -> list[Frame]:
        found = [await self.receive()]
        while (found[-1][0], found[-1][1] & flags) != (kind, flags):
            found.append(await self.receive())
        return found

    async def request(self, stream_id: int) -> bytes:
        await self.send(request(stream_id))
        return bodies(await self.receive_until(frames.HEADERS, frames.END_STREAM))[stream_id]

    async def goaway(self) -> tuple[ErrorCode, str]:
        """Wait for GOAWAY and the end of the connection."""
        *_, (_, _, _, payload) = await self.receive_until(frames.GOAWAY)
        assert await self.reader.read() == b""
        return ErrorCode(int.from_bytes(payload[4:8], "big")), payload[8:].decode()


Errors = list[str]


class RunningListener:
    def __init__(self, app: EchoApplication, listener: Http2Listener, errors: Errors) -> None:
        self.app, self.listener, self.errors = app, listener, errors
        assert listener.socket is not None
        self.place = listener.socket.getsockname()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, hello: bytes = CLIENT_PREFACE) -> Client:
        reader, writer = await asyncio.open_connection(*self.place)
        self._writers.append(writer)
        client = Client(reader, writer)
        await client.send(hello)
        if hello == CLIENT_PREFACE:
            await client.receive_until(frames.SETTINGS, ACK)
        return client

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


Scenario = Callable[[RunningListener], Awaitable[Any]]


@contextlib.contextmanager
def start_listener(app: EchoApplication | None = None, **limits: Any) -> Iterator[Callable[[Scenario], None]]:
    """Start a listener in the event loop that the service uses; yield what runs a scenario with it."""
    errors: Errors = []
    app = app or EchoApplication()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        listener = Http2Listener(app, sock, ConnectionLog(errors.append), **limits)

        async def run(scenario: Scenario) -> None:
            port = RunningListener(app, listener, errors)
            try:
                async with asyncio.timeout(HANG_TIMEOUT_SECONDS):
                    await scenario(port)
            finally:
                port.close()

        runner.run(listener.start())
        try:
            yield lambda scenario: runner.run(run(scenario))
        finally:
            runner.run(listener.stop(5))


def run_with_listener(scenario: Scenario, **limits: Any) -> None:
    """Run a scenario with a listener that has these limits."""
    with start_listener(**limits) as run:
        run(scenario)


def advance(port: RunningListener, seconds: float) -> None:
    """Check timeouts as if so many seconds had passed."""
    now = asyncio.get_running_loop().time() + seconds
    for connection in tuple(port.listener.connections):
        connection.check_timeouts(now)


async def wait_until(happened: Callable[[], object]) -> None:
    while not happened():
        await asyncio.sleep(0)
