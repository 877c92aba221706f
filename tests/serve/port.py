"""Our HTTP/2 on a real port, and clients of it that write frame by frame."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import ACK, HEAD, Code, Frame
from serve.grpc.listener import RpcListener

from .wire import HELLO, Echo, answers, request

SECONDS = 10.0


class Client:
    """Frames over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, *said: bytes) -> None:
        self.writer.write(b"".join(said))
        await self.writer.drain()

    async def hear(self) -> Frame:
        high, low, kind, flags, stream_id = HEAD.unpack(await self.reader.readexactly(9))
        return kind, flags, stream_id, await self.reader.readexactly(high << 8 | low)

    async def hear_until(self, kind: int, flags: int = 0) -> list[Frame]:
        found = [await self.hear()]
        while (found[-1][0], found[-1][1] & flags) != (kind, flags):
            found.append(await self.hear())
        return found

    async def ask(self, stream_id: int) -> bytes:
        await self.say(request(stream_id))
        return answers(await self.hear_until(frames.HEADERS, frames.END_STREAM))[stream_id]

    async def goaway(self) -> tuple[Code, str]:
        """Why the connection ends; it does."""
        *_, (_, _, _, payload) = await self.hear_until(frames.GOAWAY)
        assert await self.reader.read() == b""
        return Code(int.from_bytes(payload[4:8], "big")), payload[8:].decode()


Told = list[str]


class Port:
    def __init__(self, app: Echo, listener: RpcListener, told: Told) -> None:
        self.app, self.listener, self.told = app, listener, told
        self.place = listener.socket.getsockname()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, hello: bytes = HELLO) -> Client:
        reader, writer = await asyncio.open_connection(*self.place)
        self._writers.append(writer)
        client = Client(reader, writer)
        await client.say(hello)
        if hello == HELLO:
            await client.hear_until(frames.SETTINGS, ACK)
        return client

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def talk(what: Callable[[Port], Awaitable[Any]]) -> None:
    """Run the listener as the service does, and a client against it."""

    async def run() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            told: Told = []
            app = Echo()
            listener = RpcListener(app, sock, refused=told.append)
            await listener.start()
            port = Port(app, listener, told)
            try:
                async with asyncio.timeout(SECONDS):
                    await what(port)
            finally:
                port.close()
                await listener.stop(5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def sweep(port: Port, seconds: float) -> None:
    """As if that much time had passed."""
    now = asyncio.get_running_loop().time() + seconds
    for connection in tuple(port.listener.connections):
        connection.sweep(now)


async def until(happened: Callable[[], object]) -> None:
    while not happened():
        await asyncio.sleep(0)
