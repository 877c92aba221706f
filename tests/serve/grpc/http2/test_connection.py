"""HTTP/2 over real sockets: clients of another implementation, clients that are slow, silent, deaf or too many."""

from __future__ import annotations

import asyncio
import itertools

import h2.config
import h2.connection
import h2.events
import pytest

from serve.grpc import listener
from serve.grpc.http2 import connection, frames
from serve.grpc.http2.frames import ACK, Code, frame

from ...port import Client, Port, sweep, talk, until
from ...wire import GRPC, HELLO, answers, block, data, head, request


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
        assert found.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
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
        if said.startswith(HELLO):
            await client.hear_until(frames.SETTINGS, ACK)
        await until(lambda: port.listener.connections)
        sweep(port, connection.HEAD_SECONDS / 2)
        assert port.told == []
        sweep(port, connection.HEAD_SECONDS + 1)
        assert await client.goaway() == (Code.ENHANCE_YOUR_CALM, "the head did not arrive whole in time")

    talk(what)


def test_an_idle_connection_is_asked_to_end_and_ends() -> None:
    async def what(port: Port) -> None:
        client = await port.open()
        assert await client.ask(1) == b"hello"
        sweep(port, 0)
        sweep(port, connection.IDLE_SECONDS - 1)
        await client.say(frame(frames.PING, 0, 0, b"12345678"))
        assert (await client.hear())[:2] == (frames.PING, ACK)
        sweep(port, connection.IDLE_SECONDS + 1)
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
        sweep(port, connection.IDLE_SECONDS + 1)
        port.app.answer(*port.app.waiting[0])
        assert answers(await client.hear_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}

    talk(what)


def test_where_there_is_no_room_the_idle_give_way_and_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "most_rpc_connections", lambda: 1)

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
