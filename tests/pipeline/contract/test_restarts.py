from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.restarts import (
    POSITIONS,
    AttemptLog,
    Event,
    GiveUp,
    ProcessEnd,
    Restart,
    attempt_files,
    attempts_from,
    decide,
    describe_restart,
    read_attempts,
    read_events,
    record_end,
    record_event,
    restart_after,
    restarts_without_progress,
)


def event(kind: str, attempt: int, time: float = 0.0, **more: object) -> Event:
    return Event.model_validate({"event": kind, "attempt": attempt, "time": time, **more})


LAUNCH = event("launch", 0)


def start(number: int, time: float, step: int = 0, hosts: tuple[str, ...] = ("a", "a")) -> Event:
    return event("start", number, time, step=step, hosts=hosts, processes=len(hosts))


def end(number: int, reason: str = "rank 1 on a was killed (SIGKILL)", **more: object) -> Event:
    return event("end", number, 0.0, **{"host": "a", "reason": reason, **more})


def lost(*steps: int, kept: Sequence[int] = ()) -> AttemptLog:
    """Attempts that began from these steps and were lost, each once; those of `kept` made a checkpoint."""
    lines = [LAUNCH]
    for number, step in enumerate(steps, 1):
        lines += [start(number, 0.0, step), *[event("checkpoint", number)] * (number in kept), end(number)]
    return attempts_from(lines)


def test_recorded_events_are_read_again(tmp_path: Path) -> None:
    record_event(tmp_path, event="launch", attempt=0)
    record_event(tmp_path, event="start", attempt=1, hosts=["a", "b"], processes=2, step=50)
    record_end(tmp_path, ProcessEnd("a", "rank 1 was killed"))
    launch, begun, end = read_events(tmp_path)
    assert (launch.event, begun.hosts, begun.step) == ("launch", ("a", "b"), 50)
    assert (end.attempt, end.reason, end.passing) == (1, "rank 1 was killed", True)


@pytest.mark.parametrize("cut", ['{"event": "sta\n', '{"event": "sta'])
def test_half_a_line_of_a_lost_machine_is_skipped(tmp_path: Path, cut: str) -> None:
    record_event(tmp_path, event="launch", attempt=0)
    (file_of_this_machine,) = attempt_files(tmp_path)
    with file_of_this_machine.open("a") as file:
        file.write(cut)
    record_event(tmp_path, event="start", attempt=1, hosts=["a"], processes=1)
    assert [found.event for found in read_events(tmp_path)] == ["launch", "start"]
    assert len(read_attempts(tmp_path).attempts) == 1


def test_each_machine_writes_its_own_file_and_clocks_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(machine: str, seconds: float, **values: Any) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: machine)
        monkeypatch.setattr("time.time", lambda: seconds)
        record_event(tmp_path, **values)

    record("a", 1000.0, event="launch", attempt=0)
    record("a", 1001.0, event="start", attempt=1, hosts=["a", "b"], processes=2)
    record("b", 7.0, event="end", attempt=1, host="b", reason="rank 1 was killed")  # its clock is behind
    record("a", 1003.0, event="start", attempt=2, hosts=["a"], processes=1)
    assert [path.name for path in attempt_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [found.event for found in read_events(tmp_path)] == ["launch", "start", "end", "start"]
    assert read_attempts(tmp_path).attempts[-1].after == "loss"


def test_attempt_is_built_from_its_lines() -> None:
    lines = [LAUNCH, start(1, 1.0), event("step", 1, 2.0, step=1), event("step", 1, 3.0), event("checkpoint", 1, 4.0)]
    (found,) = attempts_from(lines).attempts
    assert (found.number, found.step, found.after, found.has_checkpoint) == (1, 0, "launch", True)
    assert (found.started, found.first_step_time) == (1.0, 2.0)


def test_reason_of_an_attempt_follows_from_earlier_events() -> None:
    """A launch by a person is no restart."""
    lines = [LAUNCH, start(1, 1.0), event("end", 1, 2.0, host="a"), start(2, 3.0), start(3, 4.0), LAUNCH, start(4, 5.0)]
    log = attempts_from(lines)
    assert [found.after for found in log.attempts] == ["launch", "loss", "change", "launch"]
    assert log.restarts == 2


def test_lost_seconds_exclude_the_wait_for_a_person() -> None:
    first = [LAUNCH, start(1, 1.0), event("step", 1, 2.0), event("end", 1, 10.0, host="a")]
    second = [start(2, 13.0), event("step", 2, 14.5), event("end", 2, 20.0, host="a")]
    third = [LAUNCH, start(3, 1000.0), event("step", 3, 1001.0)]
    assert attempts_from([*first, *second, *third]).seconds_lost == pytest.approx(4.5)


def test_attempts_without_a_step_count_as_lost_time() -> None:
    first = [LAUNCH, start(1, 1.0), event("step", 1, 2.0), event("end", 1, 10.0, host="a")]
    second = [start(2, 13.0), event("end", 2, 14.0, host="a")]
    assert attempts_from([*first, *second, start(3, 17.0), event("step", 3, 18.0)]).seconds_lost == pytest.approx(8.0)
    assert attempts_from([*first, *second, LAUNCH, start(3, 1000.0), event("step", 3, 1001.0)]).seconds_lost == 0


@pytest.mark.parametrize(
    ("reports", "lost"),
    [([(1180.0, 80.0), (1099.0, 1.0)], 144.0), ([(1005.0, 0.0)], 57.0), ([], 57.0)],
    ids=["rank 0 waits, rank 1 is silent", "of an earlier attempt", "a single process"],
)
def test_lost_seconds_begin_with_the_last_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[tuple[float, float]], lost: float
) -> None:
    """A half-open connection is noticed late."""

    def record(seconds: float, **values: Any) -> None:
        monkeypatch.setattr("time.time", lambda: seconds)
        record_event(tmp_path, **values)

    (tmp_path / POSITIONS).mkdir(parents=True)
    for rank, damaged in enumerate(("{", "[]", "{}", "\0\0"), 2):
        (tmp_path / POSITIONS / f"{rank}.json").write_text(damaged)
    for rank, (written, still_seconds) in enumerate(reports):
        path = tmp_path / POSITIONS / f"{rank}.json"
        path.write_text(json.dumps({"still_seconds": still_seconds}))
        os.utime(path, (written, written))
    record(1009.0, event="launch", attempt=0)
    record(1010.0, event="start", attempt=1, hosts=["a", "b"], processes=2)
    monkeypatch.setattr("time.time", lambda: 1187.0)
    record_end(tmp_path, ProcessEnd("a", "rank 0 lost contact with another process"))
    record(1240.0, event="start", attempt=2, hosts=["a"], processes=1)
    record(1244.0, event="step", attempt=2)
    assert read_attempts(tmp_path).seconds_lost == lost


def test_ends_before_the_first_attempt_are_separate() -> None:
    early = [LAUNCH, event("end", 0, 1.0, host="a", reason="no torch")]
    found = attempts_from(early)
    assert (found.attempts, [end.reason for end in found.ends]) == ((), ["no torch"])
    assert attempts_from([*early, start(1, 2.0)]).ends == ()


@pytest.mark.parametrize(("times", "allowed", "stops"), [(1, 3, False), (3, 3, False), (4, 3, True), (1, 0, True)])
def test_training_gives_up_after_the_allowed_restarts(times: int, allowed: int, stops: bool) -> None:
    reason = "rank 1 on a was killed (SIGKILL)"
    expected = GiveUp(reason, times, 50) if stops else Restart(reason)
    assert decide(lost(*[50] * times), allowed) == expected


def test_a_new_checkpoint_resets_the_count() -> None:
    assert restarts_without_progress(lost(0, 0, 0, 0, kept=[4])) == 0
    assert restarts_without_progress(lost(0, 0, 0, 50)) == 1
    assert isinstance(decide(lost(0, 0, 0, 0, 50, 50), allowed=3), Restart)


def test_checkpoints_that_are_never_renamed_do_not_reset_the_count() -> None:
    """The checkpoint is recorded just before its rename, and the process dies in between each time."""
    assert isinstance(decide(lost(0, 0, 0, 0, kept=[1, 2, 3, 4]), allowed=3), GiveUp)


def test_permanent_errors_end_training_at_once() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1), end(1, "the loss is not finite", passing=False)]
    assert decide(attempts_from(lines), allowed=3) == GiveUp("the loss is not finite", 0, 0)


def test_the_cause_is_reported_before_its_consequences() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1, "rank 0 lost contact", echo=True, host="b"), end(1)]
    assert decide(attempts_from(lines), allowed=1) == Restart("rank 1 on a was killed (SIGKILL)")


def test_ends_before_an_attempt_count_as_failures() -> None:
    early = [LAUNCH, end(0), end(0), end(0)]
    assert isinstance(decide(attempts_from(early), allowed=3), Restart)
    assert decide(attempts_from([*early, end(0)]), allowed=3) == GiveUp("rank 1 on a was killed (SIGKILL)", 4, 0)
    after = [LAUNCH, start(1, 0.0, 50), end(1), end(1), end(1), end(1)]
    assert isinstance(decide(attempts_from(after), allowed=3), GiveUp)


def test_a_loss_reported_by_two_machines_counts_once() -> None:
    lines = [LAUNCH, start(1, 0.0, 50), end(1), end(1, host="b", echo=True)]
    assert restarts_without_progress(attempts_from(lines)) == 0


def test_a_launch_by_a_person_resets_the_count() -> None:
    four = [LAUNCH, *[line for n in range(1, 5) for line in (start(n, 0.0), end(n))]]
    assert isinstance(decide(attempts_from([*four, LAUNCH, start(5, 0.0), end(5)]), allowed=3), Restart)


def test_joining_machines_cost_no_restart() -> None:
    lines = [LAUNCH, start(1, 0.0), start(2, 0.0, hosts=("a", "b")), start(3, 0.0), end(3)]
    assert restarts_without_progress(attempts_from(lines)) == 0


def test_restart_message_has_cause_place_and_count() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1), start(2, 0.0, 50)]
    assert describe_restart(attempts_from(lines), 3) == (
        "rank 1 on a was killed (SIGKILL); starting again from the checkpoint of step 50 (1 of 3 without a new one)"
    )
    assert describe_restart(attempts_from(lines[:2]), 3) == "", "a person started it"
    assert "starting again from the beginning (1 of 3" in describe_restart(
        attempts_from([*lines[:3], start(2, 0.0)]), 3
    )


def test_restart_message_names_machines_that_left_or_joined() -> None:
    both, one = ("a", "b"), ("a",)
    lost_b = [LAUNCH, start(1, 0.0, hosts=both), end(1, "rank 0 lost contact", echo=True), start(2, 0.0, 50, one)]
    assert describe_restart(attempts_from(lost_b), 3) == (
        "rank 0 lost contact; b is gone, training goes on with 1 machine; "
        "starting again from the checkpoint of step 50 (1 of 3 without a new one)"
    )
    back = [*lost_b, start(3, 0.0, 60, both)]
    assert describe_restart(attempts_from(back), 3) == (
        "b has joined, training goes on with 2 machines; starting again from the checkpoint of step 60"
    )


def test_restart_after_records_the_end_it_decides_on(tmp_path: Path) -> None:
    for event_name in ("launch", "start"):
        record_event(tmp_path, event=event_name, attempt=int(event_name == "start"))
    killed = ProcessEnd("a", "rank 1 on a was killed (SIGKILL)")
    assert restart_after(tmp_path, killed, allowed=1) == Restart(killed.reason)
    assert restart_after(tmp_path, None, allowed=1) == Restart(killed.reason), "already recorded"
    assert restart_after(tmp_path, killed, allowed=1) == GiveUp(killed.reason, 2, 0)


@pytest.mark.parametrize("known", [1, 0], ids=["of its processes", "of its connection to the store"])
def test_late_end_of_a_machine_that_was_cut_off_is_no_loss_of_the_current_attempt(tmp_path: Path, known: int) -> None:
    record_event(tmp_path, event="launch", attempt=0)
    record_event(tmp_path, event="start", attempt=1, hosts=["a", "b"], processes=2)
    record_end(tmp_path, ProcessEnd("a", "the network is cut", attempt=1))
    record_event(tmp_path, event="start", attempt=2, hosts=["a"], processes=1)
    assert restart_after(tmp_path, ProcessEnd("b", "no reason is left", attempt=known), allowed=2) == Restart(
        "a machine was lost"
    )
    assert [len(attempt.ends) for attempt in read_attempts(tmp_path).attempts] == [1, 0]
    for end in (ProcessEnd("b", "it crashed", attempt=3), ProcessEnd("a", "it crashed", attempt=1)):
        record_end(tmp_path, end)  # while it joins; after the events were seen late
    assert len(read_attempts(tmp_path).ends) == 2


def test_no_machine_is_named_where_there_is_one() -> None:
    sentence = "the processes ended for a reason that is unknown; starting again from the checkpoint of step 5"
    assert describe_restart(attempts_from([LAUNCH, start(1, 1.0, 5), start(2, 2.0, 5)]), 3) == sentence


def test_the_cause_of_a_restart_is_its_whole_first_sentence() -> None:
    place = "rank 1 hangs at step 9 (gloo:all_reduce, no. 98, of [7] Float)"
    log = attempts_from(
        [LAUNCH, start(1, 1.0, 5), end(1, f"{place}. If this only takes long, raise it"), start(2, 2.0, 5)]
    )
    assert describe_restart(log, 3) == (
        f"{place}; starting again from the checkpoint of step 5 (1 of 3 without a new one)"
    )
