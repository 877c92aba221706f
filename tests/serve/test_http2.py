"""HTTP/2 over real sockets: clients of another implementation, clients that are slow, silent, deaf or too many."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import uvloop

from serve import frames, http2, rpc_listener
from serve.frames import ACK, HEAD, Code, Frame, frame
from serve.rpc_listener import RpcListener

from .wire import GRPC, HELLO, Echo, answers, block, data, head, request

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


class Judge(Client):
    """A client that checks every frame of ours against the standard, by another implementation of it."""

    async def ask_all(self, bodies: dict[int, bytes], window: int) -> dict[int, bytes]:
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        state.initiate_connection()
        state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        for number, body in bodies.items():
            state.send_headers(number, GRPC)
            state.send_data(number, body, end_stream=True)
        found, open_streams = dict.fromkeys(bodies, b""), set(bodies)
        while open_streams:
            await self.say(state.data_to_send())
            for event in state.receive_data(await self.reader.read(1 << 16)):
                assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)
                if isinstance(event, h2.events.DataReceived):
                    found[event.stream_id] += event.data
                    state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    open_streams.discard(event.stream_id)
        return found


@pytest.mark.parametrize("window", [1 << 20, 100])
def test_another_implementation_finds_nothing_wrong(window: int) -> None:
    async def what(port: Port) -> None:
        client = await port.open(b"")
        bodies = {number: bytes([number]) * (number * 100) for number in range(1, 40, 2)}
        assert await Judge(client.reader, client.writer).ask_all(bodies, window) == bodies

    talk(what)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /v2/models/tiny/infer HTTP/1.1\r\n"])
def test_a_client_of_the_older_http_is_told_where_to_go(said: bytes) -> None:
    async def what(port: Port) -> None:
        client = await port.open(said)
        found = await client.reader.read()
        assert b"HTTP/1.1 505 HTTP Version Not Supported\r\n" in found
        assert b"HTTP/1.1 is spoken on the other one" in found
        assert port.told == ["h2_http1"]

    talk(what)


def test_a_client_that_speaks_something_else_hears_so_and_is_left() -> None:
    async def what(port: Port) -> None:
        client = await port.open(b"\x16\x03\x01\x02\0\x01\0\x01")
        assert await client.goaway() == (Code.PROTOCOL_ERROR, "this is no HTTP/2 connection")
        assert port.told == ["h2_protocol_error"]

    talk(what)


@pytest.mark.parametrize("said", [b"", HELLO[:20], HELLO[:-3], HELLO + head(1, flags=0)])
def test_a_client_that_does_not_come_to_the_point_is_left(said: bytes) -> None:
    async def what(port: Port) -> None:
        client = await port.open(said)
        await client.hear_until(frames.WINDOW_UPDATE)
        if said.startswith(HELLO):
            await client.hear_until(frames.SETTINGS, ACK)
            await asyncio.sleep(0)
        sweep(port, http2.HEAD_SECONDS / 2)
        assert port.told == []
        sweep(port, http2.HEAD_SECONDS + 1)
        assert await client.goaway() == (Code.ENHANCE_YOUR_CALM, "the head did not arrive whole in time")

    talk(what)


def test_an_idle_connection_is_asked_to_end_and_ends() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        assert await client.ask(1) == b"hello"
        sweep(port, 0)
        sweep(port, http2.IDLE_SECONDS - 1)
        await client.say(frame(frames.PING, 0, 0, b"12345678"))
        assert (await client.hear())[:2] == (frames.PING, ACK)
        sweep(port, http2.IDLE_SECONDS + 1)
        _, (_, _, _, ping) = await client.hear_until(frames.PING)
        await client.say(frame(frames.PING, ACK, 0, ping))
        assert await client.goaway() == (Code.NO_ERROR, "")
        assert port.told == []

    talk(what)


def test_one_with_a_call_is_not_idle() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        await client.say(request(1, path=b"/waits"))
        await until(lambda: port.app.waiting)
        sweep(port, 0)
        sweep(port, http2.IDLE_SECONDS + 1)
        port.app.answer(*port.app.waiting[0])
        assert answers(await client.hear_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}

    talk(what)


def test_where_there_is_no_room_the_idle_give_way_and_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_listener, "most_connections", lambda: 1)

    async def what(port: Port) -> None:
        first = await port.open()
        second = await port.open()
        assert await first.goaway() == (Code.NO_ERROR, "")
        await second.say(request(1, path=b"/waits"))
        await until(lambda: port.app.waiting)
        third = await port.open(b"")
        assert await third.goaway() == (Code.ENHANCE_YOUR_CALM, "1 connections are being served already")
        port.app.answer(*port.app.waiting[0])
        assert answers(await second.hear_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}

    talk(what)


def test_a_client_that_never_reads_is_read_no_more_and_then_left() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        await client.say(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MOST_WINDOW}))
        await client.say(frames.window_update(0, frames.MOST_WINDOW - frames.FIRST_WINDOW))
        (connection,) = port.listener.connections
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        numbers = itertools.count(1, 2)
        while not connection._streams.paused:
            number = next(numbers)
            assert number < 99
            await client.say(head(number), data(number, b"x" * 16384, 0) * 200, data(number, b""))
            await asyncio.sleep(0)
        assert connection.transport.get_write_buffer_size() < 8 << 20
        sweep(port, 0)
        sweep(port, 1)
        assert not connection.transport.is_closing()
        sweep(port, 1000)
        assert connection.transport.is_closing()

    talk(what)


def test_at_the_end_what_was_asked_is_answered_and_the_client_closes_in_peace() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        await client.say(request(1, path=b"/waits"))
        await until(lambda: port.app.waiting)
        stopping = asyncio.create_task(port.listener.stop(SECONDS))
        (kind, _, _, payload), (_, _, _, ping) = await client.hear_until(frames.PING)
        assert (kind, payload[:4]) == (frames.GOAWAY, frames.MOST_WINDOW.to_bytes(4, "big"))
        await client.say(request(3), frame(frames.PING, ACK, 0, ping))
        found = await client.hear_until(frames.GOAWAY)
        assert answers(found) == {3: b"hello"}
        assert found[-1][3][:4] == (3).to_bytes(4, "big")
        port.app.answer(*port.app.waiting[0])
        assert answers(await client.hear_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}
        assert await client.reader.read() == b""
        assert not stopping.done(), "the client has not closed it yet"
        client.writer.close()
        await stopping

    talk(what)


def test_a_client_that_does_not_hear_of_the_end_is_left_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_ACK_SECONDS", 0.01)
    monkeypatch.setattr(http2, "_GOODBYE_SECONDS", 0.01)

    async def what(port: Port) -> None:
        client = await port.open()
        assert await client.ask(1) == b"hello"
        await port.listener.stop(SECONDS)
        assert port.listener.connections == set()

    talk(what)


def test_a_client_that_hangs_up_takes_its_requests_along() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        await client.say(head(1), request(3, path=b"/waits"))
        await until(lambda: port.app.waiting)
        client.writer.close()
        await until(port.app.waiting[0][1].left)
        assert port.app.told[-1] == "lost 1"
        port.app.answer(*port.app.waiting[0])
        assert port.listener.connections == set()

    talk(what)


def test_the_block_of_a_head_is_remembered_only_where_nothing_else_was_said() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        await client.say(
            frame(frames.HEADERS, 4, 1, block(GRPC)), data(1, b"a"), frame(frames.HEADERS, 4, 3, block(GRPC))
        )
        await client.say(data(3, b"b"))
        found = await client.hear_until(frames.HEADERS, frames.END_STREAM)
        found += await client.hear_until(frames.HEADERS, frames.END_STREAM)
        assert answers(found) == {1: b"a", 3: b"b"}
        assert port.app.learnt == 1

    talk(what)
