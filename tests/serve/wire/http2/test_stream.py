"""The send queue, with windows smaller than the answers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.wire.connection_limits import WRITE_TIMEOUT_SECONDS, CallMemory
from serve.wire.http2 import frames
from serve.wire.http2.stream import SendQueue, Stream
from tests.serve.wire.http2.frames import FUZZ_SETTINGS, split_frames


def new_queue() -> SendQueue:
    return SendQueue(CallMemory(1 << 30))


def new_stream(number: int, window: int, *, complete: bool = True) -> Stream:
    made = Stream(number, None, None)
    made.window_offset = window - frames.DEFAULT_WINDOW
    made.complete = complete
    return made


def test_small_answer_is_one_write() -> None:
    send_queue = new_queue()
    data, whole = send_queue.add(new_stream(1, 100), b"head", b"body", b"end")
    assert whole
    assert split_frames(data) == [
        (frames.HEADERS, frames.END_HEADERS, 1, b"head"),
        (frames.DATA, 0, 1, b"body"),
        (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"end"),
    ]
    assert send_queue.window == frames.DEFAULT_WINDOW - 4


def test_trailers_only_answer_needs_no_window() -> None:
    send_queue = new_queue()
    send_queue.window = 0
    data, whole = send_queue.add(new_stream(1, 0), b"", b"", b"end")
    assert whole
    assert split_frames(data) == [(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"end")]


@pytest.mark.parametrize("window", [0, 100])
def test_client_still_sending_gets_rst_stream_no_error(window: int) -> None:
    send_queue = new_queue()
    stream = new_stream(1, window, complete=False)
    data, _ = send_queue.add(stream, b"head", b"body", b"end")
    send_queue.widen_stream(stream, 100)
    data += send_queue.take()[0]
    assert split_frames(data)[-1] == (frames.RST_STREAM, 0, 1, b"\0\0\0\0")


@FUZZ_SETTINGS
@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=4),
    room=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40_000)), max_size=30),
    frame_bytes=st.sampled_from([16384, 20_000, 1 << 20]),
)
def test_windows_are_respected_and_every_answer_arrives(
    sizes: list[int], room: list[tuple[int, int]], frame_bytes: int
) -> None:
    send_queue = new_queue()
    send_queue.frame_bytes = frame_bytes
    send_queue.window = 1000
    streams = {number: new_stream(number, 500) for number in range(1, 2 * len(sizes), 2)}
    allowed = {0: 1000, **dict.fromkeys(streams, 500)}
    bodies = {number: bytes([number]) * size for number, size in zip(streams, sizes, strict=True)}
    found = dict.fromkeys(streams, b"")
    ended: list[int] = []

    def read(data: bytes) -> None:
        for kind, flags, number, payload in split_frames(data):
            assert number not in ended
            if kind == frames.DATA:
                assert len(payload) <= frame_bytes
                found[number] += payload
                for one in (0, number):
                    allowed[one] -= len(payload)
                    assert allowed[one] >= 0
            elif flags & frames.END_STREAM:
                ended.append(number)

    for number, stream in streams.items():
        read(send_queue.add(stream, b"head", bodies[number], b"end")[0])
        read(send_queue.take()[0])
    enough = [(one, 300_000) for one in range(len(sizes) + 1)]
    for place, size in (*room, *enough):
        number = 0 if place == 0 else min(2 * place - 1, max(streams))
        allowed[number] += size
        if number:
            send_queue.widen_stream(streams[number], size)
        else:
            send_queue.widen(size)
        while data := send_queue.take()[0]:
            read(data)
    assert found == bodies
    assert sorted(ended) == sorted(streams)
    assert (send_queue.queued_bytes, send_queue.has_queued) == (0, False)


def test_answers_take_turns() -> None:
    send_queue = new_queue()
    send_queue.window = 0
    for number in (1, 3):
        send_queue.add(new_stream(number, 1 << 20), b"head", b"x" * 40_000, b"end")
    send_queue.widen(1 << 20)
    assert [number for kind, _, number, _ in split_frames(send_queue.take()[0]) if kind == frames.DATA] == [
        1,
        3,
        1,
        3,
        1,
        3,
    ]


def test_initial_window_size_can_make_a_window_negative() -> None:
    send_queue = new_queue()
    stream = new_stream(1, 65535)
    send_queue.add(stream, b"head", b"x" * 100_000, b"end")
    send_queue.take()
    send_queue.apply_settings(frames.settings({frames.INITIAL_WINDOW_SIZE: 10})[9:], [stream])
    assert (send_queue.initial_window, send_queue.stream_window(stream)) == (10, 10 - 65535)
    send_queue.widen(1 << 20)
    assert send_queue.take()[0] == b""
    send_queue.widen_stream(stream, 65535)
    assert [len(payload) for _, _, _, payload in split_frames(send_queue.take()[0])] == [10]


def test_discarded_answer_is_not_sent() -> None:
    send_queue = new_queue()
    stream = new_stream(1, 0)
    send_queue.add(stream, b"head", b"body", b"end")
    assert send_queue.queued_bytes == 4
    send_queue.discard(stream)
    send_queue.discard(stream)
    assert (send_queue.queued_bytes, send_queue.take()) == (0, (b"", []))


def test_stream_without_window_is_stalled() -> None:
    send_queue = new_queue()
    stream = new_stream(1, 0)
    send_queue.add(stream, b"head", b"body", b"end")
    assert send_queue.stalled(stream.opened_at, paused=False) == []
    assert send_queue.stalled(stream.opened_at + WRITE_TIMEOUT_SECONDS + 1, paused=False) == [stream]


def test_paused_transport_does_not_count_as_stalled() -> None:
    send_queue = new_queue()
    stream = new_stream(1, 0)
    send_queue.add(stream, b"head", b"body", b"end")
    assert send_queue.stalled(stream.opened_at + 1000, paused=True) == []
    assert send_queue.stalled(stream.opened_at + 1000 + WRITE_TIMEOUT_SECONDS, paused=False) == []
    assert send_queue.stalled(stream.opened_at + 1001 + WRITE_TIMEOUT_SECONDS, paused=False) == [stream]


def test_waiting_for_a_turn_does_not_count_as_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    send_queue = new_queue()
    send_queue.window = 0
    first, second = new_stream(1, 1 << 20), new_stream(3, 1 << 20)
    for stream in (first, second):
        send_queue.add(stream, b"head", b"x" * 40_000, b"end")
    turns = []
    for _ in range(3):
        send_queue.widen(16_384)
        now += WRITE_TIMEOUT_SECONDS - 1
        turns += [number for kind, _, number, _ in split_frames(send_queue.take()[0]) if kind == frames.DATA]
        assert send_queue.stalled(now + 2, paused=False) == []
    assert turns == [1, 3, 1]
    assert send_queue.stalled(now + WRITE_TIMEOUT_SECONDS + 1, paused=False) == [first, second]
