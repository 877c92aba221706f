"""HTTP/2 streams without a socket."""

from __future__ import annotations

import time
from typing import Any

import hpack
import pytest

from serve.wire import connection_limits as limits
from serve.wire.connection_limits import BUDGET_PER_SECOND, CREDIT_PER_ANSWER, FLOOD_BUDGET, FloodGuard
from serve.wire.http2 import frames, streams
from serve.wire.http2.frames import ACK, END_HEADERS, END_STREAM, PADDED, PRIORITY_FLAG, ErrorCode, Frame, frame
from tests.serve.wire.http2.frames import (
    GRPC,
    EchoConnection,
    bodies,
    data,
    decode_fields,
    encode_block,
    headers,
    open_connection,
    request,
    resets,
)


def test_flood_budget_returns_with_time_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    guard = FloodGuard()
    assert guard.charge(FLOOD_BUDGET)
    assert not guard.charge(1)
    guard.credit()
    assert guard.charge(CREDIT_PER_ANSWER - 1)
    assert not guard.charge(1)
    now += 1
    assert guard.charge(1)
    assert guard.charge(BUDGET_PER_SECOND - 2)
    assert not guard.charge(2)


def test_flood_budget_never_exceeds_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    guard = FloodGuard()
    for _ in range(10_000):
        guard.credit()
    assert not guard.charge(FLOOD_BUDGET + CREDIT_PER_ANSWER)


UINT = 4


@pytest.fixture
def client() -> EchoConnection:
    return open_connection()


def test_request_is_answered(client: EchoConnection) -> None:
    found = client.send(request(1))
    assert [(kind, flags) for kind, flags, _, _ in found] == [
        (frames.HEADERS, END_HEADERS),
        (frames.DATA, 0),
        (frames.HEADERS, END_HEADERS | END_STREAM),
    ]
    assert bodies(found) == {1: b"hello"}
    assert client.app.events == ["headers 1", "complete 1 5"]
    assert client.streams.open == {}


def test_request_is_understood_however_it_is_split_and_padded(client: EchoConnection) -> None:
    whole = encode_block(GRPC)
    sent = (
        frame(frames.HEADERS, PADDED | PRIORITY_FLAG, 1, b"\x03" + b"\0\0\0\0\x10" + whole[:7] + b"\0\0\0")
        + frame(frames.CONTINUATION, 0, 1, whole[7:20])
        + frame(frames.CONTINUATION, END_HEADERS, 1, whole[20:])
        + frame(frames.DATA, PADDED, 1, b"\x02hel\0\0")
        + data(1, b"lo", 0)
        + headers(1, [(b"x-more", b"1")], END_HEADERS | END_STREAM)
    )
    found: list[Frame] = []
    for place in range(len(sent)):
        found += client.send(sent[place : place + 1])
    assert bodies(found) == {1: b"hello"}


def test_header_blocks_of_a_warm_table_are_cached(client: EchoConnection) -> None:
    encoder = hpack.Encoder()
    for number in range(1, 41, 2):
        sent = frame(frames.HEADERS, END_HEADERS, number, bytes(encoder.encode(GRPC)))
        assert bodies(client.send(sent, data(number, b"%d" % number))) == {number: b"%d" % number}
    assert client.app.parsed_heads == 2, "once with literals, once with indexes"


def test_table_change_invalidates_cached_header_blocks(client: EchoConnection) -> None:
    encoder = hpack.Encoder()
    seen = set()
    for number, path in enumerate((b"/a", b"/b", b"/b", b"/c", b"/c", b"/a")):
        fields = [*GRPC[:2], (b":path", path)]
        sent = frame(frames.HEADERS, END_HEADERS, 2 * number + 1, bytes(encoder.encode(fields)))
        client.send(sent)
        headers: Any = client.streams.open[2 * number + 1].head
        assert headers[b":path"] == path
        seen.add(sent[9:])
    assert len(seen) < 6, "some blocks must be equal, else nothing was tested"


# Cancelled requests


def test_incomplete_request_can_be_cancelled(client: EchoConnection) -> None:
    client.send(headers(1), data(1, b"he", 0), frames.rst_stream(1, ErrorCode.CANCEL))
    assert client.app.events[-1] == "cancel 1"
    assert client.streams.open == {}


def test_cancelled_running_request_stays_open_until_answered(client: EchoConnection) -> None:
    client.send(request(1, path=b"/waits"), frames.rst_stream(1, ErrorCode.CANCEL))
    (_, stream), *_ = client.app.waiting
    assert stream.cancelled
    assert list(client.streams.open) == [1]
    client.app.answer(*client.app.waiting[0])
    assert client.received() == []
    assert client.streams.open == {}


def test_close_cancels_every_stream(client: EchoConnection) -> None:
    client.send(headers(1), request(3, path=b"/waits"))
    client.streams.close()
    assert client.app.events[-1] == "cancel 1"
    assert client.app.waiting[0][1].cancelled
    client.app.answer(*client.app.waiting[0])
    assert client.received() == []


def test_rest_of_a_request_answered_early_is_ignored(client: EchoConnection) -> None:
    found = client.send(headers(1, [*GRPC[:2], (b":path", b"/refused")]))
    assert [kind for kind, *_ in found] == [frames.HEADERS, frames.RST_STREAM]
    assert resets(found) == {1: ErrorCode.NO_ERROR}
    assert (
        client.send(
            data(1, b"x" * 16384, 0),
            data(1, b"x"),
            headers(1, [(b"a", b"b")], 5),
            frames.rst_stream(1, ErrorCode.CANCEL),
        )
        == []
    )


def test_oversized_headers_are_answered_and_the_next_request_works(client: EchoConnection) -> None:
    much = encode_block([*GRPC, (b"x-much", b"y" * 40_000)])
    pieces = [much[place : place + 16384] for place in range(0, len(much), 16384)]
    sent = frame(frames.HEADERS, 0, 1, pieces[0])
    sent += b"".join(frame(frames.CONTINUATION, 0, 1, one) for one in pieces[1:])
    found = client.send(sent, frame(frames.CONTINUATION, END_HEADERS, 1, b""))
    assert decode_fields(found[0][3]) == {b":status": b"431"}
    assert bodies(client.send(request(3))) == {3: b"hello"}


# Windows


def test_windows_are_returned_as_a_body_arrives(client: EchoConnection) -> None:
    found = client.send(headers(1))
    for _ in range(1000):
        found += client.send(data(1, b"x" * 16384, 0))
    given = {0: 0, 1: 0}
    for kind, _, number, payload in found:
        assert kind == frames.WINDOW_UPDATE
        given[number] += int.from_bytes(payload, "big")
    assert 1000 * 16384 - given[0] <= streams._CONNECTION_WINDOW // 2
    assert 1000 * 16384 - given[1] <= streams._STREAM_WINDOW // 2
    assert client.app.events[-1] == "data 1 16384"


def test_large_answer_waits_for_window(client: EchoConnection) -> None:
    body = b"x" * 100_000
    pieces = [body[place : place + 16384] for place in range(0, len(body), 16384)]
    found = client.send(headers(1), *(data(1, one, 0) for one in pieces), data(1, b""))
    assert sum(len(payload) for kind, _, _, payload in found if kind == frames.DATA) == frames.DEFAULT_WINDOW
    found = client.send(frames.window_update(1, 50_000))
    assert found == []
    found = client.send(frames.window_update(0, 50_000))
    assert sum(len(payload) for kind, _, _, payload in found if kind == frames.DATA) == 100_000 - frames.DEFAULT_WINDOW
    assert found[-1][1] & END_STREAM
    assert client.streams.open == {}


def test_cancelled_large_answer_is_discarded(client: EchoConnection) -> None:
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}), request(1))
    assert client.streams.send_queue.queued_bytes == 4
    client.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert (client.streams.send_queue.queued_bytes, client.streams.open) == (0, {})
    assert "cancel 1" not in client.app.events


def test_client_without_window_opens_no_streams(client: EchoConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_BYTES", 10)
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), request(1, b"x" * 11))
    assert resets(client.send(request(3))) == {3: ErrorCode.REFUSED_STREAM}


def test_stalled_answer_is_reset(client: EchoConnection) -> None:
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), request(1))
    client.streams.check_timeouts(0)
    assert client.received() == []
    client.streams.check_timeouts(float("inf"))
    assert resets(client.received()) == {1: ErrorCode.CANCEL}


def test_stalled_request_times_out(client: EchoConnection) -> None:
    client.send(headers(1))
    client.streams.check_timeouts(0)
    assert client.app.events == ["headers 1"]
    client.streams.check_timeouts(float("inf"))
    assert client.app.events[-1] == "timeout 1"
    assert resets(client.received()) == {1: ErrorCode.NO_ERROR}


# Draining


def test_draining_accepts_streams_until_ping_is_acknowledged(client: EchoConnection) -> None:
    client.send(request(1, path=b"/waits"))
    client.streams.start_draining()
    goaway, ping = client.received()
    assert goaway[3][:UINT] == frames.MAX_WINDOW.to_bytes(UINT, "big")
    assert bodies(client.send(request(3))) == {3: b"hello"}
    found = client.send(frame(frames.PING, ACK, 0, ping[3]))
    assert found == [(frames.GOAWAY, 0, 0, (3).to_bytes(UINT, "big") + b"\0" * UINT)]
    assert client.send(request(5), data(5, b"x"), frames.rst_stream(5, ErrorCode.CANCEL)) == []
    assert client.drained == []
    client.app.answer(*client.app.waiting[0])
    assert client.drained == [True]


def test_idle_connection_ends_when_ping_is_acknowledged(client: EchoConnection) -> None:
    client.streams.start_draining()
    (_, ping) = client.received()
    assert client.drained == []
    client.send(frame(frames.PING, ACK, 0, ping[3]))
    assert client.drained == [True]
