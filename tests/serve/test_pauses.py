"""Clients that were refused for lack of capacity are not read for a while, so that refusals stay cheap."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from typing import Any

import pytest

from serve import load_shedding
from serve.load_shedding import Pauses
from serve.monitoring.logs import ConnectionLog
from serve.wire.http1 import Request
from serve.wire.listeners import Http1Listener

REQUEST = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"


class Refusing:
    """Refuses each request, and pauses its client."""

    request_class = Request

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.ends: list[Any] = []

    def begin(self, request: Request) -> None:
        self.seen.append(request)
        request.respond_now(503, (), b"")
        self.ends.append(request.pause())


def test_paused_client_is_not_read_and_its_request_counts_as_old() -> None:
    async def run() -> None:
        app = Refusing()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            listener = Http1Listener(app, sock, [], ConnectionLog())
            await listener.start()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            paused_at = time.monotonic()
            writer.write(REQUEST)
            other_reader, other_writer = await asyncio.open_connection(*sock.getsockname())
            other_writer.write(REQUEST)
            await other_reader.readuntil(b"\r\n\r\n")
            assert len(app.seen) == 2, "that of the paused client is not read"
            app.ends[0]()
            await reader.readuntil(b"\r\n\r\n")
            assert app.seen[0].received_at <= app.seen[2].received_at <= paused_at
            paused_at = time.monotonic()  # paused again, as soon as the request after the first pause was read
            writer.write(REQUEST)
            await asyncio.sleep(0.02)
            app.ends[2]()
            await reader.readuntil(b"\r\n\r\n")
            assert app.seen[3].received_at <= paused_at
            writer.close()
            other_writer.close()
            app.ends[1]()  # gone
            app.ends[3]()
            await listener.stop(5)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_limited_number_of_pauses_ends_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedding, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(load_shedding, "_PAUSES_ENDED", 2)

    async def run() -> None:
        pauses, ended = Pauses(), list[int]()
        for number in range(5):
            pauses.add(partial(ended.append, number))
        counts = set()
        while len(ended) < 4:
            await asyncio.sleep(0)
            counts.add(len(ended))
        assert counts == {0, 2, 4}
        pauses.end_all()
        assert ended == [0, 1, 2, 3, 4]

    asyncio.run(asyncio.wait_for(run(), 30))
