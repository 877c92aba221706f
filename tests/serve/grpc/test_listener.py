"""The end of the gRPC port: what was asked before a client heard of it is answered."""

from __future__ import annotations

import asyncio

import pytest

from serve.grpc.http2 import connection, frames
from serve.grpc.http2.frames import ACK, Code, frame

from ..port import SECONDS, Port, talk, until
from ..wire import HELLO, answers, request


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


def test_a_client_that_had_not_begun_yet_is_still_answered_at_the_end() -> None:
    async def what(port: Port) -> None:
        client = await port.open(b"")
        await until(lambda: port.listener.connections)
        stopping = asyncio.create_task(port.listener.stop(SECONDS))
        await asyncio.sleep(0)
        await client.say(HELLO, request(1))
        found = await client.hear_until(frames.HEADERS, frames.END_STREAM)
        assert answers(found) == {1: b"hello"}
        (ping,) = [payload for kind, flags, _, payload in found if (kind, flags) == (frames.PING, 0)]
        await client.say(frame(frames.PING, ACK, 0, ping))
        assert (await client.goaway())[0] is Code.NO_ERROR
        client.writer.close()
        await stopping

    talk(what)


def test_a_client_that_does_not_hear_of_the_end_is_left_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_ACK_SECONDS", 0.01)
    monkeypatch.setattr(connection, "_GOODBYE_SECONDS", 0.01)

    async def what(port: Port) -> None:
        client = await port.open()
        assert await client.ask(1) == b"hello"
        await port.listener.stop(SECONDS)
        assert port.listener.connections == set()

    talk(what)
