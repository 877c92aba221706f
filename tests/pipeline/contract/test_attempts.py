from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contract.attempts import ATTEMPTS_FILE, Event, read_events, read_story, story, tell, tell_end


def event(kind: str, attempt: int, time: float = 0.0, **more: object) -> Event:
    return Event.model_validate({"event": kind, "attempt": attempt, "time": time, **more})


LAUNCH = event("launch", 0)


def start(number: int, time: float, step: int = 0, hosts: tuple[str, ...] = ("a", "a")) -> Event:
    return event("start", number, time, step=step, hosts=hosts, processes=len(hosts))


def test_what_is_told_is_read_again(tmp_path: Path) -> None:
    tell(tmp_path, event="launch", attempt=0)
    tell(tmp_path, event="start", attempt=1, hosts=["a", "b"], processes=2, step=50)
    tell_end(tmp_path, host="a", reason="rank 1 was killed")
    launch, begun, end = read_events(tmp_path)
    assert (launch.event, begun.hosts, begun.step) == ("launch", ("a", "b"), 50)
    assert (end.attempt, end.reason, end.passing) == (1, "rank 1 was killed", True)


def test_half_a_line_that_a_lost_machine_left_is_passed_over(tmp_path: Path) -> None:
    tell(tmp_path, event="launch", attempt=0)
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"event": "sta\n')
    tell(tmp_path, event="start", attempt=1, hosts=["a"], processes=1)
    assert [found.event for found in read_events(tmp_path)] == ["launch", "start"]
    assert len(read_story(tmp_path).attempts) == 1


def test_a_run_that_was_never_trained_has_no_attempts(tmp_path: Path) -> None:
    assert read_story(tmp_path).attempts == ()


def test_an_attempt_is_told_by_its_lines() -> None:
    lines = [LAUNCH, start(1, 1.0), event("step", 1, 2.0, step=1), event("step", 1, 3.0), event("checkpoint", 1, 4.0)]
    (found,) = story(lines).attempts
    assert (found.number, found.step, found.started, found.stepped, found.kept) == (1, 0, 1.0, 2.0, True)
    assert found.after == "launch"


def test_why_an_attempt_began_is_told_by_what_came_before_it() -> None:
    lines = [LAUNCH, start(1, 1.0), event("end", 1, 2.0, host="a"), start(2, 3.0), start(3, 4.0), LAUNCH, start(4, 5.0)]
    assert [found.after for found in story(lines).attempts] == ["launch", "loss", "change", "launch"]


def test_restarts_are_those_that_training_made_by_itself() -> None:
    lines = [LAUNCH, start(1, 1.0), event("end", 1, 2.0, host="a"), start(2, 3.0), LAUNCH, start(3, 9.0)]
    assert story(lines).restarts == 1


def test_lost_seconds_are_those_until_the_next_first_step_and_not_those_until_somebody_came() -> None:
    first = [LAUNCH, start(1, 1.0), event("step", 1, 2.0), event("end", 1, 10.0, host="a")]
    second = [start(2, 13.0), event("step", 2, 14.5), event("end", 2, 20.0, host="a")]
    third = [LAUNCH, start(3, 1000.0), event("step", 3, 1001.0)]
    assert story([*first, *second, *third]).seconds_lost == pytest.approx(4.5)


def test_an_attempt_that_made_no_step_is_lost_time_as_well() -> None:
    first = [LAUNCH, start(1, 1.0), event("step", 1, 2.0), event("end", 1, 10.0, host="a")]
    second = [start(2, 13.0), event("end", 2, 14.0, host="a")]
    assert story([*first, *second, start(3, 17.0), event("step", 3, 18.0)]).seconds_lost == pytest.approx(8.0)
    assert story([*first, *second, LAUNCH, start(3, 1000.0), event("step", 3, 1001.0)]).seconds_lost == 0


def test_ends_before_an_attempt_are_kept_apart() -> None:
    early = [LAUNCH, event("end", 0, 1.0, host="a", reason="no torch")]
    found = story(early)
    assert (found.attempts, [end.reason for end in found.ends]) == ((), ["no torch"])
    assert story([*early, start(1, 2.0)]).ends == ()
