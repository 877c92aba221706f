"""Violations of RFC 9113: each is a stream error or a connection error."""

from __future__ import annotations

import pytest

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITY_FLAG,
    ConnectionFault,
    ErrorCode,
    frame,
)
from tests.serve.grpc.http2_frames import GRPC, EchoConnection, bodies, data, headers, open_connection, request, resets


@pytest.fixture
def client() -> EchoConnection:
    return open_connection()


def raw(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    return frames.FRAME_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id)


CONNECTION_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "DATA of no stream": (data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA of a stream not opened": (data(9, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA of a stream of ours": (data(2, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA padded beyond its end": (headers(1) + frame(frames.DATA, PADDED, 1, b"\x09x"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of no stream": (headers(0), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of a stream of ours": (headers(2), ErrorCode.PROTOCOL_ERROR),
    "HEADERS of a stream that is answered": (request(1) + headers(1), ErrorCode.STREAM_CLOSED),
    "HEADERS of a stream passed over": (request(5) + headers(3), ErrorCode.PROTOCOL_ERROR),
    "HEADERS padded beyond their end": (
        frame(frames.HEADERS, PADDED | END_HEADERS, 1, b"\x05abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "HEADERS too short for a priority": (
        frame(frames.HEADERS, PRIORITY_FLAG | END_HEADERS, 1, b"\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "another frame within a head": (
        headers(1, flags=0) + frame(frames.PING, 0, 0, b"12345678"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "an unknown frame within a head": (headers(1, flags=0) + frame(0xFA, 0, 0, b""), ErrorCode.PROTOCOL_ERROR),
    "HEADERS within a head": (headers(1, flags=0) + headers(3), ErrorCode.PROTOCOL_ERROR),
    "CONTINUATION of another stream": (
        headers(1, flags=0) + frame(frames.CONTINUATION, END_HEADERS, 3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of no head": (frame(frames.CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "a head that is no HPACK": (
        frame(frames.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "trailers that are no HPACK": (headers(1) + frame(frames.HEADERS, 5, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
    "PRIORITY too short": (headers(1) + frame(frames.PRIORITY, 0, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "PRIORITY of an idle stream too short": (frame(frames.PRIORITY, 0, 9, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "PUSH_PROMISE": (frame(frames.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of a stream not opened": (frames.rst_stream(9, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of no stream": (frames.rst_stream(0, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM too long": (headers(1) + frame(frames.RST_STREAM, 0, 1, b"\0" * 5), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of half a setting": (frame(frames.SETTINGS, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS that acknowledge something": (frame(frames.SETTINGS, ACK, 0, b"\0" * 6), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS with a window too wide": (
        frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "SETTINGS that widen a stream too far": (
        headers(1)
        + frames.window_update(1, frames.MAX_WINDOW - 65535)
        + frames.settings({frames.INITIAL_WINDOW_SIZE: 65536}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "PING too short": (frame(frames.PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frame(frames.GOAWAY, 0, 1, b"\0" * 8), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE too far": (frames.window_update(0, frames.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE too short": (frame(frames.WINDOW_UPDATE, 0, 0, b"\0" * 3), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a stream not opened": (frames.window_update(9, 1), ErrorCode.PROTOCOL_ERROR),
    "a frame too long": (raw(frames.DATA, 0, 1, 16385), ErrorCode.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_error(client: EchoConnection, name: str) -> None:
    sent, code = CONNECTION_ERRORS[name]
    with pytest.raises(ConnectionFault) as caught:
        client.send(sent)
    assert caught.value.code is code
    assert " " in str(caught.value)


STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "a malformed head": (headers(1, GRPC[1:]), ErrorCode.PROTOCOL_ERROR),
    "an upper-case name": (headers(1, [*GRPC, (b"X", b"1")]), ErrorCode.PROTOCOL_ERROR),
    "a body longer than its content-length": (
        headers(1, [*GRPC, (b"content-length", b"1")]) + data(1, b"xy"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "no body despite a content-length": (
        headers(1, [*GRPC, (b"content-length", b"1")], END_HEADERS | END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a length that is no number": (headers(1, [*GRPC, (b"content-length", b"x")]), ErrorCode.PROTOCOL_ERROR),
    "trailers before the end": (headers(1) + headers(1, [(b"a", b"b")]), ErrorCode.PROTOCOL_ERROR),
    "a second request in a stream": (headers(1) + headers(1, GRPC, END_HEADERS | END_STREAM), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (headers(1) + frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE too far": (headers(1) + frames.window_update(1, frames.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "DATA behind the end": (request(1, path=b"/waits") + data(1, b"x"), ErrorCode.STREAM_CLOSED),
    "HEADERS behind the end": (request(1, path=b"/waits") + headers(1), ErrorCode.STREAM_CLOSED),
    "DATA of a stream that is answered": (request(1) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_error_leaves_other_streams_working(client: EchoConnection, name: str) -> None:
    sent, code = STREAM_ERRORS[name]
    found = client.send(sent, request(3))
    assert resets(found) == {1: code}
    assert client.errors == [code]
    assert bodies(found)[3] == b"hello"


@pytest.mark.parametrize(
    "sent", [request(1), frames.frame(frames.SETTINGS, ACK, 0), frame(frames.PING, 0, 0, b"12345678"), data(1, b"x")]
)
def test_connection_must_begin_with_settings(sent: bytes) -> None:
    with pytest.raises(ConnectionFault, match="first frame must be SETTINGS"):
        EchoConnection().send(frames.PREFACE, sent)
