"""HTTP/2 without a socket: what a client writes, and what comes back."""

from __future__ import annotations

import time
from typing import Any

import hpack
import pytest

from serve.grpc.http2 import frames, streams
from serve.grpc.http2.frames import ACK, END_HEADERS, END_STREAM, PADDED, PRIORITIZED, Code, Frame, frame
from serve.grpc.http2.streams import Goodwill

from ...wire import GRPC, Echoing, answers, block, data, fields_of, greeted, head, request, resets


def test_it_is_used_up_comes_back_with_time_and_sooner_by_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    will = Goodwill()
    assert will.spend(streams._MOST)
    assert not will.spend(1)
    will.earn()
    assert will.spend(streams._EARNED - 1)
    assert not will.spend(1)
    now += 1
    assert will.spend(1)
    assert will.spend(streams._PER_SECOND - 2)
    assert not will.spend(2)


def test_it_is_never_more_than_at_the_beginning() -> None:
    will = Goodwill()
    for _ in range(10_000):
        will.earn()
    assert not will.spend(streams._MOST + streams._EARNED)


UINT = 4


@pytest.fixture
def talk() -> Echoing:
    return greeted()


def test_a_request_is_answered(talk: Echoing) -> None:
    found = talk.say(request(1))
    assert [(kind, flags) for kind, flags, _, _ in found] == [
        (frames.HEADERS, END_HEADERS),
        (frames.DATA, 0),
        (frames.HEADERS, END_HEADERS | END_STREAM),
    ]
    assert answers(found) == {1: b"hello"}
    assert talk.app.told == ["opened 1", "complete 1 5"]
    assert talk.streams.open == {}


def test_however_it_is_cut_and_padded(talk: Echoing) -> None:
    whole = block(GRPC)
    said = (
        frame(frames.HEADERS, PADDED | PRIORITIZED, 1, b"\x03" + b"\0\0\0\0\x10" + whole[:7] + b"\0\0\0")
        + frame(frames.CONTINUATION, 0, 1, whole[7:20])
        + frame(frames.CONTINUATION, END_HEADERS, 1, whole[20:])
        + frame(frames.DATA, PADDED, 1, b"\x02hel\0\0")
        + data(1, b"lo", 0)
        + head(1, [(b"x-more", b"1")], END_HEADERS | END_STREAM)
    )
    found: list[Frame] = []
    for place in range(len(said)):
        found += talk.say(said[place : place + 1])
    assert answers(found) == {1: b"hello"}


def test_what_is_not_known_is_overlooked(talk: Echoing) -> None:
    assert talk.say(frame(0xFA, 0xFF, 3, b"?"), frame(frames.PRIORITY, 0, 9, b"\0" * 5)) == []
    assert talk.say(frames.settings({0xABCD: 1, 2: 0, frames.MAX_CONCURRENT_STREAMS: 0})) == [
        (frames.SETTINGS, ACK, 0, b"")
    ]
    assert talk.say(frames.goaway(0, Code.NO_ERROR, "bye")) == []
    assert answers(talk.say(request(7))) == {7: b"hello"}


def test_a_ping_is_answered_and_an_answer_is_not(talk: Echoing) -> None:
    assert talk.say(frame(frames.PING, 0, 0, b"12345678")) == [(frames.PING, ACK, 0, b"12345678")]
    assert talk.say(frame(frames.PING, ACK, 0, b"12345678")) == []


def test_a_client_whose_table_is_warm_is_understood_by_its_bytes(talk: Echoing) -> None:
    encoder = hpack.Encoder()
    for number in range(1, 41, 2):
        said = frame(frames.HEADERS, END_HEADERS, number, bytes(encoder.encode(GRPC)))
        assert answers(talk.say(said, data(number, b"%d" % number))) == {number: b"%d" % number}
    assert talk.app.learnt == 2, "once to fill the table, once from it"


def test_the_same_bytes_mean_another_thing_when_the_table_has_changed(talk: Echoing) -> None:
    encoder = hpack.Encoder()
    seen = set()
    for number, path in enumerate((b"/a", b"/b", b"/b", b"/c", b"/c", b"/a")):
        fields = [*GRPC[:2], (b":path", path)]
        said = frame(frames.HEADERS, END_HEADERS, 2 * number + 1, bytes(encoder.encode(fields)))
        talk.say(said)
        about: Any = talk.streams.open[2 * number + 1].about
        assert about[b":path"] == path
        seen.add(said[9:])
    assert len(seen) < 6, "or nothing was tried"


# What a client takes back


def test_a_request_taken_back_before_it_is_whole_is_lost(talk: Echoing) -> None:
    talk.say(head(1), data(1, b"he", 0), frames.reset(1, Code.CANCEL))
    assert talk.app.told[-1] == "lost 1"
    assert talk.streams.open == {}


def test_one_taken_back_later_is_told_so_counts_until_it_is_done_and_is_not_answered(talk: Echoing) -> None:
    talk.say(request(1, path=b"/waits"), frames.reset(1, Code.CANCEL))
    (_, stream), *_ = talk.app.waiting
    assert stream.left()
    assert list(talk.streams.open) == [1]
    talk.app.answer(*talk.app.waiting[0])
    assert talk.heard() == []
    assert talk.streams.open == {}


def test_a_client_that_is_gone_takes_back_everything(talk: Echoing) -> None:
    talk.say(head(1), request(3, path=b"/waits"))
    talk.streams.close()
    assert talk.app.told[-1] == "lost 1"
    assert talk.app.waiting[0][1].left()
    talk.app.answer(*talk.app.waiting[0])
    assert talk.heard() == []


def test_what_is_refused_early_may_still_be_sent_to_its_end(talk: Echoing) -> None:
    found = talk.say(head(1, [*GRPC[:2], (b":path", b"/refused")]))
    assert [kind for kind, *_ in found] == [frames.HEADERS, frames.RST_STREAM]
    assert resets(found) == {1: Code.NO_ERROR}
    assert (
        talk.say(data(1, b"x" * 16384, 0), data(1, b"x"), head(1, [(b"a", b"b")], 5), frames.reset(1, Code.CANCEL))
        == []
    )


def test_a_head_that_is_too_long_is_answered_and_the_next_understood(talk: Echoing) -> None:
    much = block([*GRPC, (b"x-much", b"y" * 40_000)])
    pieces = [much[place : place + 16384] for place in range(0, len(much), 16384)]
    said = frame(frames.HEADERS, 0, 1, pieces[0])
    said += b"".join(frame(frames.CONTINUATION, 0, 1, one) for one in pieces[1:])
    found = talk.say(said, frame(frames.CONTINUATION, END_HEADERS, 1, b""))
    assert fields_of(found[0][3]) == {b":status": b"431"}
    assert answers(talk.say(request(3))) == {3: b"hello"}


# Windows


def test_a_large_body_is_given_room_as_it_comes(talk: Echoing) -> None:
    found = talk.say(head(1))
    for _ in range(1000):
        found += talk.say(data(1, b"x" * 16384, 0))
    given = {0: 0, 1: 0}
    for kind, _, number, payload in found:
        assert kind == frames.WINDOW_UPDATE
        given[number] += int.from_bytes(payload, "big")
    assert 1000 * 16384 - given[0] <= streams._WINDOW // 2
    assert 1000 * 16384 - given[1] <= streams._STREAM_WINDOW // 2
    assert talk.app.told[-1] == "grew 1 16384"


def test_a_large_answer_waits_for_room(talk: Echoing) -> None:
    body = b"x" * 100_000
    pieces = [body[place : place + 16384] for place in range(0, len(body), 16384)]
    found = talk.say(head(1), *(data(1, one, 0) for one in pieces), data(1, b""))
    assert sum(len(payload) for kind, _, _, payload in found if kind == frames.DATA) == frames.FIRST_WINDOW
    found = talk.say(frames.window_update(1, 50_000))
    assert found == []
    found = talk.say(frames.window_update(0, 50_000))
    assert sum(len(payload) for kind, _, _, payload in found if kind == frames.DATA) == 100_000 - frames.FIRST_WINDOW
    assert found[-1][1] & END_STREAM
    assert talk.streams.open == {}


def test_a_large_answer_taken_back_is_dropped(talk: Echoing) -> None:
    talk.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}), request(1))
    assert talk.streams.outbox.held == 4
    talk.say(frames.reset(1, Code.CANCEL))
    assert (talk.streams.outbox.held, talk.streams.open) == (0, {})
    assert "lost 1" not in talk.app.told


def test_who_makes_no_room_opens_no_streams(talk: Echoing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_HELD_BYTES", 10)
    talk.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), request(1, b"x" * 11))
    assert resets(talk.say(request(3))) == {3: Code.REFUSED_STREAM}


def test_what_is_not_taken_for_long_is_given_up(talk: Echoing) -> None:
    talk.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), request(1))
    talk.streams.sweep(0)
    assert talk.heard() == []
    talk.streams.sweep(float("inf"))
    assert resets(talk.heard()) == {1: Code.CANCEL}


def test_what_does_not_come_for_long_is_given_up(talk: Echoing) -> None:
    talk.say(head(1))
    talk.streams.sweep(0)
    assert talk.app.told == ["opened 1"]
    talk.streams.sweep(float("inf"))
    assert talk.app.told[-1] == "late 1"
    assert resets(talk.heard()) == {1: Code.NO_ERROR}


# The end


def test_at_the_end_streams_are_taken_until_the_client_has_heard_of_it(talk: Echoing) -> None:
    talk.say(request(1, path=b"/waits"))
    talk.streams.retire()
    goaway, ping = talk.heard()
    assert goaway[3][:UINT] == frames.MOST_WINDOW.to_bytes(UINT, "big")
    assert answers(talk.say(request(3))) == {3: b"hello"}
    found = talk.say(frame(frames.PING, ACK, 0, ping[3]))
    assert found == [(frames.GOAWAY, 0, 0, (3).to_bytes(UINT, "big") + b"\0" * UINT)]
    assert talk.say(request(5), data(5, b"x"), frames.reset(5, Code.CANCEL)) == []
    assert talk.settled == []
    talk.app.answer(*talk.app.waiting[0])
    assert talk.settled == [True]


def test_an_idle_connection_ends_when_the_client_has_heard_of_it(talk: Echoing) -> None:
    talk.streams.retire()
    (_, ping) = talk.heard()
    assert talk.settled == []
    talk.say(frame(frames.PING, ACK, 0, ping[3]))
    assert talk.settled == [True]
