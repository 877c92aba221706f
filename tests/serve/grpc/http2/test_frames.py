from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import PREFACE, Code, ConnectionFault, Cutter, StreamFault, frame

from ...wire import RANDOM

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, frames.MOST_WINDOW), st.binary(max_size=300)),
    max_size=8,
)


@RANDOM
@given(wanted=FRAMES, cuts=st.lists(st.integers(1, 400), max_size=30))
def test_frames_are_the_same_however_they_are_cut(wanted: list[frames.Frame], cuts: list[int]) -> None:
    data = b"".join(frame(*one) for one in wanted)
    cutter, position = Cutter(), 0
    found: list[frames.Frame] = []
    for size in (*cuts, len(data)):
        found += cutter.feed(data[position : position + size])
        position += size
    assert found == wanted
    assert cutter.rest == b""


def test_a_greeting_may_come_in_pieces_and_with_what_follows_it() -> None:
    cutter = Cutter()
    assert not cutter.greet(PREFACE[:10])
    assert cutter.greet(PREFACE[10:] + frame(frames.PING, 0, 0, b"12345678")[:5])
    assert list(cutter.feed(frame(frames.PING, 0, 0, b"12345678")[5:])) == [(frames.PING, 0, 0, b"12345678")]


def test_another_greeting_is_refused_at_its_first_wrong_byte() -> None:
    cutter = Cutter()
    assert not cutter.greet(PREFACE[:10])
    with pytest.raises(ConnectionFault, match="no HTTP/2"):
        cutter.greet(b"x")


def test_a_frame_that_is_too_long_is_refused_before_it_is_here() -> None:
    cutter = Cutter()
    head = frames.HEAD.pack(frames.FRAME_BYTES >> 8, 1, frames.DATA, 0, 1)
    with pytest.raises(ConnectionFault) as caught:
        list(cutter.feed(head))
    assert caught.value.code is Code.FRAME_SIZE_ERROR


@pytest.mark.parametrize(("payload", "wanted"), [(b"\x00abc", b"abc"), (b"\x02abc", b"a"), (b"\x03abc", b"")])
def test_padding_is_taken_off(payload: bytes, wanted: bytes) -> None:
    assert frames.unpadded(frames.PADDED, payload) == wanted
    assert frames.unpadded(0, payload) == payload


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04abc", b"\xff"])
def test_more_padding_than_there_is_is_a_fault(payload: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        frames.unpadded(frames.PADDED, payload)
    assert caught.value.code is Code.PROTOCOL_ERROR


def test_settings_are_pairs() -> None:
    said = {frames.INITIAL_WINDOW_SIZE: frames.MOST_WINDOW, frames.MAX_FRAME_SIZE: 1 << 20, 0xABCD: 7}
    assert dict(frames.settings_of(frames.settings(said)[9:])) == said


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        (2, 2, Code.PROTOCOL_ERROR),
        (frames.INITIAL_WINDOW_SIZE, 1 << 31, Code.FLOW_CONTROL_ERROR),
        (frames.MAX_FRAME_SIZE, 16383, Code.PROTOCOL_ERROR),
        (frames.MAX_FRAME_SIZE, 1 << 24, Code.PROTOCOL_ERROR),
    ],
)
def test_a_setting_beyond_its_bounds_is_a_fault(key: int, value: int, code: Code) -> None:
    with pytest.raises(ConnectionFault) as caught:
        list(frames.settings_of(frames.settings({key: value})[9:]))
    assert caught.value.code is code


def test_half_a_setting_is_a_fault() -> None:
    with pytest.raises(ConnectionFault) as caught:
        list(frames.settings_of(b"\0" * 7))
    assert caught.value.code is Code.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    ("kind", "flags", "stream_id", "size", "fault", "code"),
    [
        (frames.PUSH_PROMISE, 0, 1, 4, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.SETTINGS, 0, 1, 0, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.SETTINGS, frames.ACK, 0, 6, ConnectionFault, Code.FRAME_SIZE_ERROR),
        (frames.PING, 0, 1, 8, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.PING, 0, 0, 7, ConnectionFault, Code.FRAME_SIZE_ERROR),
        (frames.GOAWAY, 0, 1, 8, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.GOAWAY, 0, 0, 7, ConnectionFault, Code.FRAME_SIZE_ERROR),
        (frames.RST_STREAM, 0, 0, 4, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.RST_STREAM, 0, 1, 5, ConnectionFault, Code.FRAME_SIZE_ERROR),
        (frames.PRIORITY, 0, 0, 5, ConnectionFault, Code.PROTOCOL_ERROR),
        (frames.PRIORITY, 0, 1, 4, StreamFault, Code.FRAME_SIZE_ERROR),
        (frames.WINDOW_UPDATE, 0, 1, 3, ConnectionFault, Code.FRAME_SIZE_ERROR),
    ],
)
def test_a_frame_of_the_wrong_form_is_a_fault(
    kind: int, flags: int, stream_id: int, size: int, fault: type[ConnectionFault | StreamFault], code: Code
) -> None:
    with pytest.raises(fault) as caught:
        frames.check(kind, flags, stream_id, b"\0" * size)
    assert vars(caught.value)["code"] is code


@pytest.mark.parametrize(
    ("kind", "stream_id", "size"),
    [
        (frames.SETTINGS, 0, 0),
        (frames.PING, 0, 8),
        (frames.GOAWAY, 0, 30),
        (frames.RST_STREAM, 1, 4),
        (frames.PRIORITY, 1, 5),
        (frames.WINDOW_UPDATE, 0, 4),
        (frames.WINDOW_UPDATE, 3, 4),
        (0xEE, 3, 17),
    ],
)
def test_one_of_the_right_form_is_none(kind: int, stream_id: int, size: int) -> None:
    frames.check(kind, 0, stream_id, b"\0" * size)
