from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.wire.http2 import frames
from serve.wire.http2.frames import PREFACE, ConnectionFault, ErrorCode, FrameReader, frame
from tests.serve.wire.http2.frames import FUZZ_SETTINGS

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, frames.MAX_WINDOW), st.binary(max_size=300)),
    max_size=8,
)


@FUZZ_SETTINGS
@given(wanted=FRAMES, cuts=st.lists(st.integers(1, 400), max_size=30))
def test_frames_are_read_however_they_are_split(wanted: list[frames.Frame], cuts: list[int]) -> None:
    data = b"".join(frame(*one) for one in wanted)
    reader, position = FrameReader(), 0
    found: list[frames.Frame] = []
    for size in (*cuts, len(data)):
        found += reader.feed(data[position : position + size])
        position += size
    assert found == wanted
    assert reader.buffer == b""


def test_preface_may_arrive_in_pieces() -> None:
    reader = FrameReader()
    assert not reader.read_preface(PREFACE[:10])
    assert reader.read_preface(PREFACE[10:] + frame(frames.PING, 0, 0, b"12345678")[:5])
    assert list(reader.feed(frame(frames.PING, 0, 0, b"12345678")[5:])) == [(frames.PING, 0, 0, b"12345678")]


def test_wrong_preface_is_rejected_at_its_first_byte() -> None:
    reader = FrameReader()
    assert not reader.read_preface(PREFACE[:10])
    with pytest.raises(ConnectionFault, match="not an HTTP/2"):
        reader.read_preface(b"x")


def test_oversized_frame_is_rejected_by_its_header() -> None:
    reader = FrameReader()
    head = frames.FRAME_HEADER.pack(frames.MAX_FRAME_BYTES >> 8, 1, frames.DATA, 0, 1)
    with pytest.raises(ConnectionFault) as caught:
        list(reader.feed(head))
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(("payload", "wanted"), [(b"\x00abc", b"abc"), (b"\x02abc", b"a"), (b"\x03abc", b"")])
def test_padding_is_stripped(payload: bytes, wanted: bytes) -> None:
    assert frames.strip_padding(frames.PADDED, payload) == wanted
    assert frames.strip_padding(0, payload) == payload


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04abc", b"\xff"])
def test_padding_longer_than_the_payload_is_a_fault(payload: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        frames.strip_padding(frames.PADDED, payload)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_settings_round_trip() -> None:
    sent = {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, frames.MAX_FRAME_SIZE: 1 << 20, 0xABCD: 7}
    assert dict(frames.parse_settings(frames.settings(sent)[9:])) == sent


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
def test_valid_frames_pass(kind: int, stream_id: int, size: int) -> None:
    frames.validate_frame(kind, 0, stream_id, b"\0" * size)
