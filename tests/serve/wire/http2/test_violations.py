"""Violations of RFC 9113 that h2spec does not have: each is a stream error or a connection error."""

from __future__ import annotations

import pytest

from serve.wire.http2 import frames
from serve.wire.http2.frames import ACK, END_HEADERS, END_STREAM, PRIORITY_FLAG, ConnectionFault, ErrorCode, frame
from tests.serve.wire.http2.frames import GRPC, EchoConnection, bodies, data, headers, open_connection, request, resets


@pytest.fixture
def client() -> EchoConnection:
    return open_connection()


CONNECTION_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "DATA of a stream of ours": (data(2, b"x"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS too short for a priority": (
        frame(frames.HEADERS, PRIORITY_FLAG | END_HEADERS, 1, b"\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "CONTINUATION of another stream": (
        headers(1, flags=0) + frame(frames.CONTINUATION, END_HEADERS, 3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "trailers that are no HPACK": (headers(1) + frame(frames.HEADERS, 5, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
    "PRIORITY of an idle stream too short": (frame(frames.PRIORITY, 0, 9, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "GOAWAY too short": (frame(frames.GOAWAY, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS that widen a stream too far": (
        headers(1)
        + frames.window_update(1, frames.MAX_WINDOW - 65535)
        + frames.settings({frames.INITIAL_WINDOW_SIZE: 65536}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_error(client: EchoConnection, name: str) -> None:
    sent, code = CONNECTION_ERRORS[name]
    with pytest.raises(ConnectionFault) as caught:
        client.send(sent)
    assert caught.value.code is code
    assert " " in str(caught.value)


STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "no body despite a content-length": (
        headers(1, [*GRPC, (b"content-length", b"1")], END_HEADERS | END_STREAM),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a length that is no number": (headers(1, [*GRPC, (b"content-length", b"x")]), ErrorCode.PROTOCOL_ERROR),
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
