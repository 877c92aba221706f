"""Floods: clients that cause work without requests are disconnected with ENHANCE_YOUR_CALM."""

from __future__ import annotations

import itertools

import pytest

from serve.grpc.http2 import frames, streams
from serve.grpc.http2.frames import END_HEADERS, PADDED, ErrorCode, frame
from tests.serve.grpc.http2_frames import (
    GRPC,
    EchoConnection,
    bodies,
    data,
    encode_block,
    headers,
    open_connection,
    request,
    resets,
)


@pytest.fixture
def client() -> EchoConnection:
    return open_connection()


def test_streams_above_the_limit_are_refused(client: EchoConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    found = client.send(*(request(number, path=b"/waits") for number in (1, 3, 5)))
    assert resets(found) == {5: ErrorCode.REFUSED_STREAM}
    client.app.answer(*client.app.waiting[0])
    assert resets(client.send(request(7))) == {}


FLOODS: dict[str, list[bytes]] = {
    "pings": [frame(frames.PING, 0, 0, b"12345678")],
    "settings": [frames.settings({})],
    "priorities": [frame(frames.PRIORITY, 0, 1, b"\0" * 5)],
    "unknown frames": [frame(0xFA, 0, 0)],
    "updates": [frames.window_update(0, 1)],
    "empty data": [headers(1), data(1, b"", 0)],
    "tiny data": [headers(1), data(1, b"x", 0)],
    "tiny window updates": [
        frames.settings({frames.INITIAL_WINDOW_SIZE: 0}),
        request(1, b"x" * 16_384),
        frames.window_update(1, 1),
    ],
    "only padding": [headers(1), frame(frames.DATA, PADDED, 1, b"\xc8" + b"\0" * 200)],
    "data of closed streams": [request(1), data(1, b"x", 0)],
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_control_frames_ends_the_connection(client: EchoConnection, name: str) -> None:
    *before, frame_of_flood = FLOODS[name]
    client.send(*before)
    assert client.send_until_fault(itertools.repeat(frame_of_flood * 100, 30)) is ErrorCode.ENHANCE_YOUR_CALM


def test_rapid_reset_ends_the_connection(client: EchoConnection) -> None:
    sent = (
        request(number, path=b"/waits") + frames.rst_stream(number, ErrorCode.CANCEL) for number in range(1, 20_000, 2)
    )
    assert client.send_until_fault(sent) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(client.streams.open) <= streams.MAX_STREAMS


@pytest.mark.parametrize(("piece", "count"), [(b"", 100), (b"x" * 16384, 10)])
def test_endless_continuation_ends_the_connection(client: EchoConnection, piece: bytes, count: int) -> None:
    client.send(headers(1, flags=0))
    sent = itertools.repeat(frame(frames.CONTINUATION, 0, 1, piece), count)
    assert client.send_until_fault(sent) is ErrorCode.ENHANCE_YOUR_CALM


def test_expensive_header_blocks_end_the_connection(client: EchoConnection) -> None:
    big = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000
    dear = encode_block(GRPC) + big + b"\xbe" * 10_000
    sent = (frame(frames.HEADERS, END_HEADERS, number, dear) for number in range(1, 20_000, 2))
    assert client.send_until_fault(sent) is ErrorCode.ENHANCE_YOUR_CALM


def test_answered_requests_earn_budget_for_control_frames(client: EchoConnection) -> None:
    for number in range(1, 4 * streams._FLOOD_BUDGET, 2):
        client.send(request(number), frames.window_update(0, 1), frame(frames.PING, 0, 0, b"12345678"))
    assert bodies(client.send(request(99_999))) == {99_999: b"hello"}
