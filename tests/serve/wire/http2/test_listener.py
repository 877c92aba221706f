"""Stopping the gRPC port: open calls are answered."""

from __future__ import annotations

import asyncio

import pytest

from serve.wire.http2 import connection, frames
from serve.wire.http2.frames import ACK, ErrorCode, frame
from tests.serve.wire.http2.frames import CLIENT_PREFACE, bodies, request
from tests.serve.wire.http2.listener import HANG_TIMEOUT_SECONDS, RunningListener, run_with_listener, wait_until


def test_stop_answers_open_calls_before_closing() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        await client.send(request(1, path=b"/waits"))
        await wait_until(lambda: port.app.waiting)
        stopping = asyncio.create_task(port.listener.stop(HANG_TIMEOUT_SECONDS))
        (kind, _, _, payload), (_, _, _, ping) = await client.receive_until(frames.PING)
        assert (kind, payload[:4]) == (frames.GOAWAY, frames.MAX_WINDOW.to_bytes(4, "big"))
        await client.send(request(3), frame(frames.PING, ACK, 0, ping))
        found = await client.receive_until(frames.GOAWAY)
        assert bodies(found) == {3: b"hello"}
        assert found[-1][3][:4] == (3).to_bytes(4, "big")
        port.app.answer(*port.app.waiting[0])
        assert bodies(await client.receive_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}
        assert await client.reader.read() == b""
        assert not stopping.done(), "the client has not closed its connection yet"
        client.writer.close()
        await stopping

    run_with_listener(scenario)


def test_stop_answers_a_connection_without_requests_yet() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(b"")
        await wait_until(lambda: port.listener.connections)
        stopping = asyncio.create_task(port.listener.stop(HANG_TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        await client.send(CLIENT_PREFACE, request(1))
        found = await client.receive_until(frames.HEADERS, frames.END_STREAM)
        assert bodies(found) == {1: b"hello"}
        (ping,) = [payload for kind, flags, _, payload in found if (kind, flags) == (frames.PING, 0)]
        await client.send(frame(frames.PING, ACK, 0, ping))
        assert (await client.goaway())[0] is ErrorCode.NO_ERROR
        client.writer.close()
        await stopping

    run_with_listener(scenario)


def test_stop_closes_a_client_that_ignores_goaway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_DRAIN_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.01)

    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        assert await client.request(1) == b"hello"
        await port.listener.stop(HANG_TIMEOUT_SECONDS)
        assert port.listener.connections == set()

    run_with_listener(scenario)
