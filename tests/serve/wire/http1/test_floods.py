"""Clients that flood a port, beside an honest one: its latency is bounded in turns of the event loop, not in seconds.

A turn is an iteration of the event loop, in which each connection gets what arrived for it. The work of a turn is the
number of functions that are called in it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serve.wire.connection_limits import UNSENT_HIGH_WATER_BYTES, BufferLimit
from serve.wire.http1 import Connection
from tests.quick import quick
from tests.serve.wire.http1.fakes import Application, connect, make_host
from tests.serve.wire.transport import FakeTransport

READ_BYTES = 256_000  # what uvloop reads at once
HONEST = b"GET /honest HTTP/1.1\r\nhost: x\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
MAX_TURNS = 3  # until an honest request is answered
MAX_CALLS_PER_TURN = 20_000  # for each attacking connection: about 2 ms
ATTACKERS, TURNS, TURNS_BETWEEN = 2, 32, 4  # an honest request every so many turns


@contextmanager
def counted_calls(counts: list[int]) -> Iterator[None]:
    """Add the number of calls of functions within to the last of `counts`, without those of the garbage collector."""

    def count(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            counts[-1] += 1

    gc.disable()  # it would call what waits for the end of other tests' objects
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


class Port:
    """The connections of one listener, without a network."""

    def __init__(self, app: Application | None = None, **limits: Any) -> None:
        self.app = app or Application()
        self.host = make_host(self.app, **limits)
        self.transports: list[FakeTransport] = []

    def connect(self, peer: str = "192.0.2.1") -> FakeTransport:
        transport = FakeTransport(peer)
        connect(self.app, transport, self.host)
        self.transports.append(transport)
        return transport

    @property
    def connections(self) -> set[Connection]:
        return self.host.connections

    async def close(self) -> None:
        for transport in self.transports:
            transport.close()
        while self.connections or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)


class Flood:
    """A client that repeats the same bytes as fast as its connection is read."""

    def __init__(self, port: Port, begin: bytes, again: bytes, piece: int) -> None:
        self._port, self._begin, self._again, self._piece = port, begin, again, piece
        self._connect()

    def _connect(self) -> None:
        self.transport, self._unsent = self._port.connect(), self._begin

    def send(self) -> None:
        if self.transport.lost or self.transport.closing:
            self._connect()
        if self.transport.reading_paused:
            return
        while self._again and len(self._unsent) < self._piece:
            self._unsent += self._again * (1 + (self._piece - len(self._unsent)) // len(self._again))
        piece, self._unsent = self._unsent[: self._piece], self._unsent[self._piece :]
        if piece:
            self.transport.connection.data_received(piece)


# bytes sent first, bytes that are repeated, and the size of the pieces
FLOODS: dict[str, tuple[bytes, bytes, int]] = {
    "pipelined requests": (b"", GET, READ_BYTES),
    "pipelined refusals": (b"", b"GET /refused HTTP/1.1\r\nhost: x\r\n\r\n", READ_BYTES),
    "pipelined requests behind one that waits": (b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n", GET, READ_BYTES),
    "pipelined bodies": (b"", POST + b"content-length: 1\r\n\r\na", READ_BYTES),
    "pipelined large bodies": (b"", POST + b"content-length: 30000\r\n\r\n" + b"a" * 30_000, READ_BYTES),
    "pipelined chunked bodies": (b"", CHUNKED + b"1\r\na\r\n0\r\n\r\n", READ_BYTES),
    "requests to upgrade": (b"", POST + b"connection: upgrade\r\nupgrade: x\r\n\r\n", READ_BYTES),
    "requests to upgrade with bodies": (
        b"",
        POST + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 2\r\n\r\nab",
        READ_BYTES,
    ),
    "expect-continue": (b"", POST + b"expect: 100-continue\r\ncontent-length: 1\r\n\r\na", READ_BYTES),
    "HTTP/1.0": (b"", b"GET / HTTP/1.0\r\n\r\n", READ_BYTES),
    "heads of many headers": (b"", GET[:-2] + b"a:b\r\n" * 120 + b"\r\n", READ_BYTES),
    "heads of large headers": (b"", GET[:-2] + b"a:" + b"b" * 30_000 + b"\r\n\r\n", READ_BYTES),
    "heads of too many headers": (b"", GET[:-2] + b"a:b\r\n" * 5000, READ_BYTES),
    "heads without an end": (GET[:-2], b"a: b\r\n", READ_BYTES),
    "long URLs": (b"", b"GET /" + b"%41" * 2500 + b" HTTP/1.1\r\nhost: x\r\n\r\n", READ_BYTES),
    "many hosts": (b"", GET[:-2] + b"host: x\r\n" * 100 + b"\r\n", READ_BYTES),
    "empty lines": (b"", b"\r\n", READ_BYTES),
    "garbage": (b"", b"\x16\x03\x01garbage", READ_BYTES),
    "tiny chunks": (CHUNKED, b"1\r\na\r\n", READ_BYTES),
    "huge chunk extensions": (CHUNKED, b"1;" + b"a" * 20_000 + b"\r\na\r\n", READ_BYTES),
    "chunk extensions without an end": (CHUNKED + b"1;", b"a" * 1000, READ_BYTES),
    "many trailers": (b"", CHUNKED + b"0\r\n" + b"a: b\r\n" * 4000 + b"\r\n", READ_BYTES),
    "trailers without an end": (CHUNKED + b"0\r\n", b"a: b\r\n", READ_BYTES),
    "a slow head": (b"", GET, 1),
    "a slow head of many headers": (GET[:-2], b"a: b\r\n", 1),
    "a slow body": (POST + b"content-length: 100000000\r\n\r\n", b"a", 1),
    "a slow chunked body": (CHUNKED, b"1\r\na\r\n", 1),
    "tiny pieces": (b"", POST + b"content-length: 9\r\n\r\n123456789", 7),
    "a body without an end": (POST + b"content-length: 10000000000\r\n\r\n", b"a" * 1000, READ_BYTES),
    "a large body that no one reads": (
        b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n",
        b"a" * 1000,
        READ_BYTES,
    ),
    "idle connections": (b"", b"", 1),
}
SAMPLE = (
    "pipelined requests",
    "heads of too many headers",
    "tiny chunks",
    "many trailers",
    "a slow chunked body",
    "idle connections",
)


@pytest.mark.parametrize("name", quick(SAMPLE, FLOODS))
def test_an_honest_client_is_answered_within_few_turns(name: str) -> None:
    async def run() -> list[int]:
        port, calls = Port(), [0]
        floods = [Flood(port, *FLOODS[name]) for _ in range(ATTACKERS)]
        for turn in range(TURNS):
            if turn % TURNS_BETWEEN == 0:
                honest, sent_at = port.connect("198.51.100.1"), turn
                gc.collect()
            calls.append(0)
            with counted_calls(calls):
                for flood in floods:
                    flood.send()
                if turn == sent_at:
                    honest.connection.data_received(HONEST)
                await asyncio.sleep(0)
            assert honest.written or turn - sent_at < MAX_TURNS, "the honest client waits"
            if honest.written and not honest.closing:
                assert honest.statuses == [200]
                honest.close()
        port.app.go_on.set()
        await port.close()
        return calls

    assert max(asyncio.run(run())) <= ATTACKERS * MAX_CALLS_PER_TURN


ANSWER = bytes(UNSENT_HIGH_WATER_BYTES + 1)


def test_unread_answers_are_bounded_over_all_connections() -> None:
    """The client that has not read for longest is disconnected."""

    async def run() -> None:
        port = Port(Application(ANSWER), unsent=BufferLimit(10 * len(ANSWER)))
        honest = port.connect("198.51.100.1")
        for number in range(100):
            transport = port.connect()
            transport.blocked = True
            transport.connection.data_received(GET * 20)
            honest.connection.data_received(HONEST)
            while honest.statuses.count(200) <= number:
                await asyncio.sleep(0)
            unsent = sum(len(one.unsent) for one in port.transports if not one.lost)
            assert unsent <= 11 * len(ANSWER)
        assert not honest.closing
        lost = [one.lost for one in port.transports[1:]]
        assert lost == sorted(lost, reverse=True), "the oldest"
        assert 90 <= sum(lost) < 100
        await port.close()
        assert port.host.unsent.held_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "begun",
    [
        POST + b"content-length: 100000\r\n\r\n" + b"a" * 50_000,
        CHUNKED + b"10000\r\n" + b"a" * 50_000,
        b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n" + GET * 2000,
        b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n" + POST + b"content-length: 50000\r\n\r\n" + b"a" * 50_000,
    ],
)
def test_endless_bodies_are_bounded_over_all_connections(begun: bytes) -> None:
    async def run() -> None:
        port = Port(received=BufferLimit(1 << 20))
        for number in range(100):
            port.connect().connection.data_received(begun)
            honest = port.connect("198.51.100.1")
            honest.connection.data_received(POST + b"content-length: 90000\r\n\r\n" + b"a" * 45_000)
            await asyncio.sleep(0)
            honest.connection.data_received(b"a" * 45_000)
            while not honest.written:
                await asyncio.sleep(0)
            assert honest.statuses == [200], number
            assert port.host.received.held_bytes <= 1 << 20
        port.app.go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert any(503 in one.statuses for one in port.transports), "the slowest are refused"
        await port.close()
        assert port.host.received.held_bytes == 0

    asyncio.run(run())


def test_a_body_is_read_a_piece_at_a_time() -> None:
    """The event loop would read all of a body that is there, or 8 MB of it, before it had time for others."""

    async def run() -> None:
        port = Port()
        client = port.connect()
        client.connection.data_received(POST + b"content-length: 10000000\r\n\r\n")
        await asyncio.sleep(0)  # the application waits for the body
        for _ in range(20):
            client.connection.data_received(b"a" * 250_000)
            client.connection.data_received(b"a" * 250_000)
            assert client.reading_paused
            while client.reading_paused and not client.written:
                await asyncio.sleep(0)
        while not client.written:
            await asyncio.sleep(0)
        assert client.statuses == [200]
        await port.close()

    asyncio.run(run())


def test_discarded_bodies_take_no_memory() -> None:
    """A body that comes after its answer is read only to reach the next request."""

    async def run() -> None:
        port = Port(received=BufferLimit(1 << 20))
        refused = port.connect()
        refused.connection.data_received(b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n")
        for _ in range(39):
            refused.connection.data_received(b"a" * 250_000)
            assert port.host.received.held_bytes == 0
        assert (refused.statuses, refused.closing) == ([503], False)
        refused.connection.data_received(b"a" * 250_000 + HONEST)
        while refused.statuses == [503]:
            await asyncio.sleep(0)
        assert refused.statuses == [503, 200]
        await port.close()

    asyncio.run(run())


def test_one_address_does_not_take_all_connections() -> None:
    async def run() -> None:
        port = Port(per_peer=5)
        flood = [port.connect() for _ in range(20)]
        assert [one.statuses for one in flood] == [[]] * 5 + [[503]] * 15
        assert b"5 connections from this address are being served already" in flood[-1].written
        honest = port.connect("198.51.100.1")
        honest.connection.data_received(HONEST)
        flood[0].close()
        while not honest.written or not flood[0].lost:
            await asyncio.sleep(0)
        assert honest.statuses == [200]
        assert port.connect().statuses == [], "there is room again"
        await port.close()
        assert len(port.host.peers) == 0

    asyncio.run(run())


def test_half_closed_connections_end_when_they_are_answered() -> None:
    async def run() -> None:
        port = Port()
        for begun in (
            GET,
            GET * 500,
            b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n",
            POST + b"content-length: 9\r\n\r\na",
            b"",
        ):
            for _ in range(10):
                transport = port.connect()
                transport.connection.data_received(begun) if begun else None
                while transport.reading_paused:
                    await asyncio.sleep(0)
                if not transport.connection.eof_received():
                    transport.close()
        port.app.go_on.set()
        while port.connections:
            await asyncio.sleep(0)
        await port.close()

    asyncio.run(run())


def test_full_listener_evicts_idle_connections_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding idle connections is linear in their number, so it must not be done for each new connection."""
    looked = [0]

    def counted(connection: Connection) -> float | None:
        looked[0] += 1
        return connection._due if connection.is_idle else None

    monkeypatch.setattr(Connection, "idle_until", property(counted))

    async def run() -> None:
        port = Port(maximum=1024, per_peer=10_000)
        for _ in range(2048):
            port.connect()
            await asyncio.sleep(0)
        assert len(port.connections) <= 1024
        assert looked[0] <= 1024 * 1024 // 4
        await port.close()

    asyncio.run(run())
