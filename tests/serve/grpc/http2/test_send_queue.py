"""What goes out when the client makes room for little of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import Code, ConnectionFault, StreamFault
from serve.grpc.http2.send_queue import Outbox
from serve.grpc.http2.stream import Stream
from serve.http1.limits import WRITE_SECONDS

from ...wire import RANDOM, cut


def stream_of(number: int, window: int, *, complete: bool = True) -> Stream:
    made = Stream(number, window, None, None)
    made.complete = complete
    return made


def test_an_answer_that_fits_is_head_data_and_trailers_in_one_write() -> None:
    outbox = Outbox()
    data, whole = outbox.answer(stream_of(1, 100), b"head", b"body", b"end")
    assert whole
    assert cut(data) == [
        (frames.HEADERS, frames.END_HEADERS, 1, b"head"),
        (frames.DATA, 0, 1, b"body"),
        (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"end"),
    ]
    assert outbox.window == frames.FIRST_WINDOW - 4


def test_one_without_a_head_is_its_trailers_and_needs_no_room() -> None:
    outbox = Outbox()
    outbox.window = 0
    data, whole = outbox.answer(stream_of(1, 0), b"", b"", b"end")
    assert whole
    assert cut(data) == [(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"end")]


@pytest.mark.parametrize("window", [0, 100])
def test_a_client_that_is_still_sending_is_told_that_it_need_not(window: int) -> None:
    outbox = Outbox()
    stream = stream_of(1, window, complete=False)
    data, _ = outbox.answer(stream, b"head", b"body", b"end")
    stream.window = 100
    data += outbox.take()[0]
    assert cut(data)[-1] == (frames.RST_STREAM, 0, 1, b"\0\0\0\0")


@RANDOM
@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=4),
    room=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40_000)), max_size=30),
    frame_bytes=st.sampled_from([16384, 20_000, 1 << 20]),
)
def test_no_window_is_ever_overdrawn_and_every_answer_arrives(
    sizes: list[int], room: list[tuple[int, int]], frame_bytes: int
) -> None:
    outbox = Outbox()
    outbox.frame_bytes = frame_bytes
    outbox.window = 1000
    streams = {number: stream_of(number, 500) for number in range(1, 2 * len(sizes), 2)}
    allowed = {0: 1000, **dict.fromkeys(streams, 500)}
    bodies = {number: bytes([number]) * size for number, size in zip(streams, sizes, strict=True)}
    found = dict.fromkeys(streams, b"")
    ended: list[int] = []

    def read(data: bytes) -> None:
        for kind, flags, number, payload in cut(data):
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
        read(outbox.answer(stream, b"head", bodies[number], b"end")[0])
        read(outbox.take()[0])
    enough = [(one, 300_000) for one in range(len(sizes) + 1)]
    for place, size in (*room, *enough):
        number = 0 if place == 0 else min(2 * place - 1, max(streams))
        allowed[number] += size
        if number:
            streams[number].widen(size)
        else:
            outbox.widen(size)
        while data := outbox.take()[0]:
            read(data)
    assert found == bodies
    assert sorted(ended) == sorted(streams)
    assert (outbox.held, outbox.waits) == (0, False)


def test_answers_take_turns() -> None:
    outbox = Outbox()
    outbox.window = 0
    for number in (1, 3):
        outbox.answer(stream_of(number, 1 << 20), b"head", b"x" * 40_000, b"end")
    outbox.widen(1 << 20)
    assert [number for kind, _, number, _ in cut(outbox.take()[0]) if kind == frames.DATA] == [1, 3, 1, 3, 1, 3]


def test_a_new_window_for_all_streams_may_leave_one_below_nothing() -> None:
    outbox = Outbox()
    stream = stream_of(1, 65535)
    outbox.answer(stream, b"head", b"x" * 100_000, b"end")
    outbox.take()
    outbox.agree(frames.settings({frames.INITIAL_WINDOW_SIZE: 10})[9:], [stream])
    assert (outbox.first_window, stream.window) == (10, 10 - 65535)
    outbox.widen(1 << 20)
    assert outbox.take()[0] == b""
    stream.widen(65535)
    assert [len(payload) for _, _, _, payload in cut(outbox.take()[0])] == [10]


def test_what_nobody_wants_any_more_is_dropped() -> None:
    outbox = Outbox()
    stream = stream_of(1, 0)
    outbox.answer(stream, b"head", b"body", b"end")
    assert outbox.held == 4
    outbox.drop(stream)
    outbox.drop(stream)
    assert (outbox.held, outbox.take()) == (0, (b"", []))


def test_who_makes_no_room_for_long_is_stuck() -> None:
    outbox = Outbox()
    stream = stream_of(1, 0)
    outbox.answer(stream, b"head", b"body", b"end")
    assert outbox.stuck(stream.since, paused=False) == []
    assert outbox.stuck(stream.since + WRITE_SECONDS + 1, paused=False) == [stream]


def test_who_waits_for_the_transport_is_not_stuck() -> None:
    outbox = Outbox()
    stream = stream_of(1, 0)
    outbox.answer(stream, b"head", b"body", b"end")
    assert outbox.stuck(stream.since + 1000, paused=True) == []
    assert outbox.stuck(stream.since + 1000 + WRITE_SECONDS, paused=False) == []
    assert outbox.stuck(stream.since + 1001 + WRITE_SECONDS, paused=False) == [stream]


def test_nor_is_who_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    outbox = Outbox()
    outbox.window = 0
    first, second = stream_of(1, 1 << 20), stream_of(3, 1 << 20)
    for stream in (first, second):
        outbox.answer(stream, b"head", b"x" * 40_000, b"end")
    turns = []
    for _ in range(3):
        outbox.widen(16_384)
        now += WRITE_SECONDS - 1
        turns += [number for kind, _, number, _ in cut(outbox.take()[0]) if kind == frames.DATA]
        assert outbox.stuck(now + 2, paused=False) == []
    assert turns == [1, 3, 1]
    assert outbox.stuck(now + WRITE_SECONDS + 1, paused=False) == [second, first]


def test_a_window_is_neither_widened_by_nothing_nor_beyond_the_most() -> None:
    outbox, stream = Outbox(), stream_of(1, 65535)
    for size, code in ((0, Code.PROTOCOL_ERROR), (frames.MOST_WINDOW, Code.FLOW_CONTROL_ERROR)):
        with pytest.raises(ConnectionFault) as caught:
            outbox.widen(size)
        assert caught.value.code is code
        with pytest.raises(StreamFault) as of_stream:
            stream.widen(size)
        assert of_stream.value.code is code
    with pytest.raises(ConnectionFault, match="wider"):
        outbox.agree(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MOST_WINDOW})[9:], [stream])
