"""Clients that say much and ask little: they are told to calm down, the useful ones never are."""

from __future__ import annotations

import itertools

import pytest

from serve.grpc.http2 import frames, streams
from serve.grpc.http2.frames import END_HEADERS, PADDED, Code, frame

from ...wire import GRPC, Echoing, answers, block, data, greeted, head, request, resets


@pytest.fixture
def talk() -> Echoing:
    return greeted()


def test_more_streams_than_may_be_are_refused(talk: Echoing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_STREAMS", 2)
    found = talk.say(*(request(number, path=b"/waits") for number in (1, 3, 5)))
    assert resets(found) == {5: Code.REFUSED_STREAM}
    talk.app.answer(*talk.app.waiting[0])
    assert resets(talk.say(request(7))) == {}


FLOODS: dict[str, list[bytes]] = {
    "pings": [frame(frames.PING, 0, 0, b"12345678")],
    "settings": [frames.settings({})],
    "priorities": [frame(frames.PRIORITY, 0, 1, b"\0" * 5)],
    "unknown frames": [frame(0xFA, 0, 0)],
    "updates": [frames.window_update(0, 1)],
    "empty data": [head(1), data(1, b"", 0)],
    "crumbs": [head(1), data(1, b"x", 0)],
    "crumbs of room": [
        frames.settings({frames.INITIAL_WINDOW_SIZE: 0}),
        request(1, b"x" * 16_384),
        frames.window_update(1, 1),
    ],
    "padding alone": [head(1), frame(frames.DATA, PADDED, 1, b"\xc8" + b"\0" * 200)],
    "data of closed streams": [request(1), data(1, b"x", 0)],
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_that_serve_nothing_ends_the_connection(talk: Echoing, name: str) -> None:
    *before, frame_of_flood = FLOODS[name]
    talk.say(*before)
    assert talk.say_until_refused(itertools.repeat(frame_of_flood * 100, 30)) is Code.ENHANCE_YOUR_CALM


def test_requests_taken_back_as_fast_as_they_are_made_end_the_connection(talk: Echoing) -> None:
    said = (request(number, path=b"/waits") + frames.reset(number, Code.CANCEL) for number in range(1, 20_000, 2))
    assert talk.say_until_refused(said) is Code.ENHANCE_YOUR_CALM
    assert len(talk.streams.open) <= streams.MOST_STREAMS


@pytest.mark.parametrize(("piece", "count"), [(b"", 100), (b"x" * 16384, 10)])
def test_a_head_in_endless_pieces_ends_the_connection(talk: Echoing, piece: bytes, count: int) -> None:
    talk.say(head(1, flags=0))
    said = itertools.repeat(frame(frames.CONTINUATION, 0, 1, piece), count)
    assert talk.say_until_refused(said) is Code.ENHANCE_YOUR_CALM


def test_heads_that_are_dear_to_read_end_the_connection(talk: Echoing) -> None:
    big = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000
    dear = block(GRPC) + big + b"\xbe" * 10_000
    said = (frame(frames.HEADERS, END_HEADERS, number, dear) for number in range(1, 20_000, 2))
    assert talk.say_until_refused(said) is Code.ENHANCE_YOUR_CALM


def test_a_useful_connection_may_say_as_much_as_it_likes(talk: Echoing) -> None:
    for number in range(1, 4 * streams._MOST, 2):
        talk.say(request(number), frames.window_update(0, 1), frame(frames.PING, 0, 0, b"12345678"))
    assert answers(talk.say(request(99_999))) == {99_999: b"hello"}
