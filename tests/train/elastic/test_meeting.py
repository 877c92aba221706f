"""Machines meet in a store: who takes part in a round, and who counts as gone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from train.elastic.meeting import Heartbeats, Machines, Meeting, MeetingEnded, Place, Round

HERE = Place(address="127.0.0.1", port=1, processes=1)


def machines(*processes: int, fewest: int, timeout: float = 300) -> list[Meeting]:
    store, most = HashStore(), len(processes)
    return [Meeting(store, "127.0.0.1", count, fewest, most, timeout) for count in processes]


def begin(*meetings: Meeting) -> list[Round]:
    with ThreadPoolExecutor(len(meetings)) as threads:
        begun: list[Future[Round]] = [threads.submit(meeting.next_round) for meeting in meetings]
        return [future.result(timeout=300) for future in begun]


def test_all_machines_begin_a_round_with_ranks_for_all_processes() -> None:
    rounds = begin(*machines(2, 1, 3, fewest=3))
    ranks = [one.first_rank + local for one in rounds for local in range(one.places[one.machine].processes)]
    assert sorted(ranks) == list(range(6))
    assert {(one.number, one.size, one.places) for one in rounds} == {(1, 6, rounds[0].places)}


def test_enough_machines_begin_after_a_last_call_and_a_later_one_ends_their_round() -> None:
    one, other, late = machines(1, 1, 1, fewest=2)
    with one.heartbeats.beating(), other.heartbeats.beating(), late.heartbeats.beating():
        assert [len(its.places) for its in begin(one, other)] == [2, 2]
        assert one.interruption() == ""
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(late.next_round)
            while one.interruption() == "":
                assert not joining.done(), "it waits for those that still train"
            assert other.interruption() == "newcomer"
            assert [len(its.places) for its in begin(one, other)] == [3, 3]
            assert joining.result(timeout=300).number == 2


def test_a_lost_process_ends_the_round_of_the_others() -> None:
    one, other = machines(1, 1, fewest=2)
    with one.heartbeats.beating(), other.heartbeats.beating(), ThreadPoolExecutor(1) as threads:
        begin(one, other)
        joining = threads.submit(other.next_round)
        while one.interruption() == "":
            assert not joining.done()
        assert one.interruption() == "loss"
        assert [its.number for its in (*begin(one), joining.result(timeout=300))] == [2, 2]


def test_a_machine_that_is_gone_is_not_waited_for() -> None:
    one, gone = machines(1, 1, fewest=1)
    with one.heartbeats.beating():
        with gone.heartbeats.beating():
            begin(one, gone)
        assert [len(its.places) for its in begin(one)] == [1]


def test_there_is_room_for_a_machine_once_another_one_has_gone() -> None:
    full = Machines(round=1, members={"a": HERE, "b": HERE})
    assert full.with_joined("c", HERE, {"a", "b", "c"}, most=2).joined == {}
    assert full.with_joined("c", HERE, {"b", "c"}, most=2).joined == {"c": HERE}
    assert full.with_joined("a", HERE, {"a", "b"}, most=2).joined == {"a": HERE}, "it joins again in its own place"
    both = full.model_copy(update={"joined": {"b": HERE, "a": HERE}})
    assert both.with_joined("c", HERE, {"a", "b", "c"}, most=2) == both
    assert [*both.begun().members] == ["a", "b"], "the same ranks as before"


def test_too_few_machines_end_the_waiting() -> None:
    with pytest.raises(MeetingEnded, match="TOO_FEW"):
        machines(1, 1, fewest=2, timeout=0)[0].next_round()


def test_a_meeting_is_closed_once_all_have_finished() -> None:
    one, other, late = machines(1, 1, 1, fewest=2)
    with one.heartbeats.beating(), other.heartbeats.beating(), ThreadPoolExecutor(1) as threads:
        first, second = begin(one, other)
        finishing = threads.submit(one.finish, first)
        other.finish(second)
        finishing.result(timeout=300)
        with pytest.raises(MeetingEnded, match="CLOSED"):
            late.next_round()


@pytest.mark.parametrize(("paused", "expected"), [(2.0, {"there"}), (4.0, set())])
def test_a_machine_without_heartbeats_for_three_seconds_is_gone(
    monkeypatch: pytest.MonkeyPatch, paused: float, expected: set[str]
) -> None:
    store, now = HashStore(), 100.0
    monkeypatch.setattr("train.elastic.meeting.time.monotonic", lambda: now)
    heartbeats = Heartbeats(store, "here")
    store.add("there", 1)
    assert heartbeats.alive({"there"}) == {"there"}
    for _ in range(int(paused * 10)):
        now += 0.1
        alive = heartbeats.alive({"there"})
    assert alive == expected
    store.add("there", 1)
    assert heartbeats.alive({"there"}) == {"there"}, "it was only stopped"


def test_machines_are_not_gone_because_this_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = HashStore(), 100.0
    monkeypatch.setattr("train.elastic.meeting.time.monotonic", lambda: now)
    heartbeats = Heartbeats(store, "here")
    heartbeats.alive({"there"})
    now += 90
    assert heartbeats.alive({"there"}) == {"there"}
