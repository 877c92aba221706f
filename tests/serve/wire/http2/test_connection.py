"""HTTP/2 over real sockets: another implementation as client; slow, silent and too many clients."""

from __future__ import annotations

import asyncio
import itertools

import h2.config
import h2.connection
import h2.events
import pytest

from serve.wire.connection_limits import HEAD_TIMEOUT_SECONDS, IDLE_SECONDS
from serve.wire.http2 import frames
from serve.wire.http2.frames import ACK, ErrorCode, frame
from tests.serve.wire.http2.frames import CLIENT_PREFACE, GRPC, bodies, data, encode_block, headers, request
from tests.serve.wire.http2.listener import Client, RunningListener, advance, run_with_listener, wait_until


class H2Client(Client):
    """Checks every received frame with the h2 package."""

    async def request_all(self, bodies: dict[int, bytes], window: int) -> dict[int, bytes]:
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        state.initiate_connection()
        state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        for number, body in bodies.items():
            state.send_headers(number, GRPC)
            state.send_data(number, body, end_stream=True)
        found, open_streams = dict.fromkeys(bodies, b""), set(bodies)
        while open_streams:
            await self.send(state.data_to_send())
            for event in state.receive_data(await self.reader.read(1 << 16)):
                assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)
                if isinstance(event, h2.events.DataReceived):
                    found[event.stream_id] += event.data
                    state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    open_streams.discard(event.stream_id)
        return found


@pytest.mark.parametrize("window", [1 << 20, 100])
def test_h2_accepts_every_frame(window: int) -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(b"")
        bodies = {number: bytes([number]) * (number * 100) for number in range(1, 40, 2)}
        assert await H2Client(client.reader, client.writer).request_all(bodies, window) == bodies

    run_with_listener(scenario)


@pytest.mark.parametrize("preface", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /v2/models/tiny/infer HTTP/1.1\r\n"])
def test_http1_client_is_pointed_to_http_port(preface: bytes) -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(preface)
        found = await client.reader.read()
        assert found.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
        assert b"use the HTTP port for HTTP/1.1" in found
        assert port.errors == ["h2_http1"]

    run_with_listener(scenario)


def test_other_protocols_are_rejected() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(b"\x16\x03\x01\x02\0\x01\0\x01")
        assert await client.goaway() == (ErrorCode.PROTOCOL_ERROR, "this is not an HTTP/2 connection")
        assert port.errors == ["h2_protocol_error"]

    run_with_listener(scenario)


@pytest.mark.parametrize(
    "preface", [b"", CLIENT_PREFACE[:20], CLIENT_PREFACE[:-3], CLIENT_PREFACE + headers(1, flags=0)]
)
def test_slow_preface_or_headers_time_out(preface: bytes) -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open(preface)
        if preface.startswith(CLIENT_PREFACE):
            await client.receive_until(frames.SETTINGS, ACK)
        await wait_until(lambda: port.listener.connections)
        advance(port, HEAD_TIMEOUT_SECONDS / 2)
        assert port.errors == []
        advance(port, HEAD_TIMEOUT_SECONDS + 1)
        assert await client.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "the request headers did not arrive in time")

    run_with_listener(scenario)


def test_idle_connection_is_drained() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        assert await client.request(1) == b"hello"
        advance(port, 0)
        advance(port, IDLE_SECONDS - 1)
        await client.send(frame(frames.PING, 0, 0, b"12345678"))
        assert (await client.receive())[:2] == (frames.PING, ACK)
        advance(port, IDLE_SECONDS + 1)
        _, (_, _, _, ping) = await client.receive_until(frames.PING)
        await client.send(frame(frames.PING, ACK, 0, ping))
        assert await client.goaway() == (ErrorCode.NO_ERROR, "")
        assert port.errors == []

    run_with_listener(scenario)


def test_connection_with_a_call_is_not_idle() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        await client.send(request(1, path=b"/waits"))
        await wait_until(lambda: port.app.waiting)
        advance(port, 0)
        advance(port, IDLE_SECONDS + 1)
        port.app.answer(*port.app.waiting[0])
        assert bodies(await client.receive_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}

    run_with_listener(scenario)


def test_full_listener_closes_idle_connections_and_rejects_others() -> None:
    async def scenario(port: RunningListener) -> None:
        first = await port.open()
        second = await port.open()
        assert await first.goaway() == (ErrorCode.NO_ERROR, "")
        await second.send(request(1, path=b"/waits"))
        await wait_until(lambda: port.app.waiting)
        third = await port.open(b"")
        assert await third.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "all 1 connections of one address are in use")
        port.app.answer(*port.app.waiting[0])
        assert bodies(await second.receive_until(frames.HEADERS, frames.END_STREAM)) == {1: b"hello"}

    run_with_listener(scenario, maximum=1)


def test_connection_with_an_incomplete_call_is_evicted() -> None:
    async def scenario(port: RunningListener) -> None:
        first = await port.open()
        await first.send(headers(1))
        await wait_until(lambda: port.app.events)
        second = await port.open()
        code, _ = await first.goaway()
        assert code is ErrorCode.ENHANCE_YOUR_CALM
        assert await second.request(1) == b"hello"

    run_with_listener(scenario, maximum=1)


def test_answers_that_wait_for_windows_are_bounded_over_all_connections() -> None:
    async def scenario(port: RunningListener) -> None:
        no_window = frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
        clients = [await port.open() for _ in range(2)]
        for client in clients:
            await client.send(no_window, headers(1), data(1, b"x" * 16_384, 0) * 3, data(1, b""))
            await client.receive_until(frames.HEADERS)
        code, _ = await clients[0].goaway()
        assert code is ErrorCode.ENHANCE_YOUR_CALM
        await clients[1].send(frames.window_update(1, 100_000))
        answer = await clients[1].receive_until(frames.HEADERS, frames.END_STREAM)
        assert b"".join(payload for kind, _, _, payload in answer if kind == frames.DATA) == b"x" * 3 * 16_384

    run_with_listener(scenario, memory_bytes=100_000)


def test_unexpected_exception_ends_its_connection_with_goaway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async def scenario(port: RunningListener) -> None:
        other = await port.open()
        client = await port.open()
        monkeypatch.setattr(port.app, "on_data", fail)
        await client.send(headers(1), data(1, b"x", 0))
        assert await client.goaway() == (ErrorCode.INTERNAL_ERROR, "internal error")
        assert await other.request(1) == b"hello"
        assert port.errors == ["h2_internal_error"]

    run_with_listener(scenario)
    assert caplog.text.count("ZeroDivisionError: a defect") == 1


def test_client_that_never_reads_is_paused_then_disconnected() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        await client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}))
        await client.send(frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))
        (connection,) = port.listener.connections
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        numbers = itertools.count(1, 2)
        while not connection._streams.paused:
            number = next(numbers)
            assert number < 99
            await client.send(headers(number), data(number, b"x" * 16384, 0) * 200, data(number, b""))
            await asyncio.sleep(0)
        assert connection.transport.get_write_buffer_size() < 8 << 20
        advance(port, 0)
        advance(port, 1)
        assert not connection.transport.is_closing()
        advance(port, 1000)
        assert connection.transport.is_closing()

    run_with_listener(scenario)


def test_disconnect_cancels_all_requests() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        await client.send(headers(1), request(3, path=b"/waits"))
        await wait_until(lambda: port.app.waiting)
        client.writer.close()
        await wait_until(lambda: port.app.waiting[0][1].cancelled)
        assert port.app.events[-1] == "cancel 1"
        port.app.answer(*port.app.waiting[0])
        assert port.listener.connections == set()

    run_with_listener(scenario)


def test_equal_header_blocks_are_parsed_once() -> None:
    async def scenario(port: RunningListener) -> None:
        client = await port.open()
        await client.send(
            frame(frames.HEADERS, 4, 1, encode_block(GRPC)),
            data(1, b"a"),
            frame(frames.HEADERS, 4, 3, encode_block(GRPC)),
        )
        await client.send(data(3, b"b"))
        found = await client.receive_until(frames.HEADERS, frames.END_STREAM)
        found += await client.receive_until(frames.HEADERS, frames.END_STREAM)
        assert bodies(found) == {1: b"a", 3: b"b"}
        assert port.app.parsed_heads == 1

    run_with_listener(scenario)
