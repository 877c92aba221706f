"""HTTP/2 as no client should write it: what each breach of RFC 9113 costs, the stream or the connection."""

from __future__ import annotations

import pytest

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import ACK, END_HEADERS, END_STREAM, PADDED, PRIORITIZED, Code, ConnectionFault, frame

from ...wire import GRPC, Echoing, answers, data, greeted, head, request, resets


@pytest.fixture
def talk() -> Echoing:
    return greeted()


def raw(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    return frames.HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id)


CONNECTION_FAULTS: dict[str, tuple[bytes, Code]] = {
    "DATA of no stream": (data(0, b"x"), Code.PROTOCOL_ERROR),
    "DATA of a stream not opened": (data(9, b"x"), Code.PROTOCOL_ERROR),
    "DATA of a stream of ours": (data(2, b"x"), Code.PROTOCOL_ERROR),
    "DATA padded beyond its end": (head(1) + frame(frames.DATA, PADDED, 1, b"\x09x"), Code.PROTOCOL_ERROR),
    "HEADERS of no stream": (head(0), Code.PROTOCOL_ERROR),
    "HEADERS of a stream of ours": (head(2), Code.PROTOCOL_ERROR),
    "HEADERS of a stream that is answered": (request(1) + head(1), Code.STREAM_CLOSED),
    "HEADERS of a stream passed over": (request(5) + head(3), Code.STREAM_CLOSED),
    "HEADERS padded beyond their end": (
        frame(frames.HEADERS, PADDED | END_HEADERS, 1, b"\x05abc"),
        Code.PROTOCOL_ERROR,
    ),
    "HEADERS too short for a priority": (
        frame(frames.HEADERS, PRIORITIZED | END_HEADERS, 1, b"\0\0"),
        Code.FRAME_SIZE_ERROR,
    ),
    "another frame within a head": (head(1, flags=0) + frame(frames.PING, 0, 0, b"12345678"), Code.PROTOCOL_ERROR),
    "an unknown frame within a head": (head(1, flags=0) + frame(0xFA, 0, 0, b""), Code.PROTOCOL_ERROR),
    "HEADERS within a head": (head(1, flags=0) + head(3), Code.PROTOCOL_ERROR),
    "CONTINUATION of another stream": (
        head(1, flags=0) + frame(frames.CONTINUATION, END_HEADERS, 3, b""),
        Code.PROTOCOL_ERROR,
    ),
    "CONTINUATION of no head": (frame(frames.CONTINUATION, END_HEADERS, 1, b""), Code.PROTOCOL_ERROR),
    "a head that is no HPACK": (frame(frames.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
    "trailers that are no HPACK": (head(1) + frame(frames.HEADERS, 5, 1, b"\xff"), Code.COMPRESSION_ERROR),
    "PUSH_PROMISE": (frame(frames.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
    "RST_STREAM of a stream not opened": (frames.reset(9, Code.CANCEL), Code.PROTOCOL_ERROR),
    "RST_STREAM of no stream": (frames.reset(0, Code.CANCEL), Code.PROTOCOL_ERROR),
    "RST_STREAM too long": (head(1) + frame(frames.RST_STREAM, 0, 1, b"\0" * 5), Code.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    "SETTINGS of half a setting": (frame(frames.SETTINGS, 0, 0, b"\0" * 7), Code.FRAME_SIZE_ERROR),
    "SETTINGS that acknowledge something": (frame(frames.SETTINGS, ACK, 0, b"\0" * 6), Code.FRAME_SIZE_ERROR),
    "SETTINGS with a window too wide": (
        frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "SETTINGS that widen a stream too far": (
        head(1)
        + frames.window_update(1, frames.MOST_WINDOW - 65535)
        + frames.settings({frames.INITIAL_WINDOW_SIZE: 65536}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "PING too short": (frame(frames.PING, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frame(frames.GOAWAY, 0, 1, b"\0" * 8), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE too far": (frames.window_update(0, frames.MOST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE too short": (frame(frames.WINDOW_UPDATE, 0, 0, b"\0" * 3), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a stream not opened": (frames.window_update(9, 1), Code.PROTOCOL_ERROR),
    "a frame too long": (raw(frames.DATA, 0, 1, 16385), Code.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
def test_who_breaks_the_rules_loses_the_connection(talk: Echoing, name: str) -> None:
    said, code = CONNECTION_FAULTS[name]
    with pytest.raises(ConnectionFault) as caught:
        talk.say(said)
    assert caught.value.code is code
    assert " " in str(caught.value)


STREAM_FAULTS: dict[str, tuple[bytes, Code]] = {
    "a malformed head": (head(1, GRPC[1:]), Code.PROTOCOL_ERROR),
    "an upper-case name": (head(1, [*GRPC, (b"X", b"1")]), Code.PROTOCOL_ERROR),
    "a body longer than it is said to be": (
        head(1, [*GRPC, (b"content-length", b"1")]) + data(1, b"xy"),
        Code.PROTOCOL_ERROR,
    ),
    "a body where there is to be none": (
        head(1, [*GRPC, (b"content-length", b"1")], END_HEADERS | END_STREAM),
        Code.PROTOCOL_ERROR,
    ),
    "a length that is no number": (head(1, [*GRPC, (b"content-length", b"x")]), Code.PROTOCOL_ERROR),
    "trailers before the end": (head(1) + head(1, [(b"a", b"b")]), Code.PROTOCOL_ERROR),
    "a second request in a stream": (head(1) + head(1, GRPC, END_HEADERS | END_STREAM), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (head(1) + frames.window_update(1, 0), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE too far": (head(1) + frames.window_update(1, frames.MOST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "PRIORITY too short": (head(1) + frame(frames.PRIORITY, 0, 1, b"\0"), Code.FRAME_SIZE_ERROR),
    "DATA behind the end": (request(1, path=b"/waits") + data(1, b"x"), Code.STREAM_CLOSED),
    "HEADERS behind the end": (request(1, path=b"/waits") + head(1), Code.STREAM_CLOSED),
    "DATA of a stream that is answered": (request(1) + data(1, b"x"), Code.STREAM_CLOSED),
}


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_who_breaks_them_in_one_stream_loses_that(talk: Echoing, name: str) -> None:
    said, code = STREAM_FAULTS[name]
    found = talk.say(said, request(3))
    assert resets(found) == {1: code}
    assert talk.refused == [code]
    assert answers(found)[3] == b"hello"


@pytest.mark.parametrize(
    "said", [request(1), frames.frame(frames.SETTINGS, ACK, 0), frame(frames.PING, 0, 0, b"12345678"), data(1, b"x")]
)
def test_a_connection_begins_with_settings(said: bytes) -> None:
    with pytest.raises(ConnectionFault, match="begins with SETTINGS"):
        Echoing().say(frames.PREFACE, said)
