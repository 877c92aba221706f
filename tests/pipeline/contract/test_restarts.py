from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.contract.attempts import Again, Event, Stop, Story, decide, story, told, used

from .test_attempts import LAUNCH, event, start


def end(number: int, reason: str = "rank 1 on a was killed (SIGKILL)", **more: object) -> Event:
    return event("end", number, 0.0, **{"host": "a", "reason": reason, **more})


def lost(*steps: int, kept: Sequence[int] = ()) -> Story:
    """Attempts that began from these steps and were lost, each once; those of `kept` made a checkpoint."""
    lines = [LAUNCH]
    for number, step in enumerate(steps, 1):
        lines += [start(number, 0.0, step), *[event("checkpoint", number)] * (number in kept), end(number)]
    return story(lines)


def test_training_that_lost_a_process_begins_again() -> None:
    assert decide(lost(0), allowed=3) == Again("rank 1 on a was killed (SIGKILL)")


@pytest.mark.parametrize(("times", "stops"), [(1, False), (3, False), (4, True)])
def test_it_does_so_as_often_in_a_row_as_it_may(times: int, stops: bool) -> None:
    assert isinstance(decide(lost(*[50] * times), allowed=3), Stop) is stops


def test_a_checkpoint_made_since_begins_the_count_anew() -> None:
    assert used(lost(0, 0, 0, 0, kept=[4])) == 0
    assert used(lost(0, 0, 0, 50)) == 1
    assert isinstance(decide(lost(0, 0, 0, 0, 50, 50), allowed=3), Again)


def test_a_checkpoint_that_never_gets_its_name_does_not_count_for_ever() -> None:
    """Told right before the rename, in which the process is killed each time."""
    assert isinstance(decide(lost(0, 0, 0, 0, kept=[1, 2, 3, 4]), allowed=3), Stop)


def test_it_may_be_told_never_to() -> None:
    assert decide(lost(0), allowed=0) == Stop("rank 1 on a was killed (SIGKILL)", 1, 0)


def test_what_would_happen_again_ends_training_whatever_the_count() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1), end(1, "the loss is not finite", passing=False)]
    assert decide(story(lines), allowed=3) == Stop("the loss is not finite", 0, 0)


def test_the_cause_is_told_before_what_followed_from_it() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1, "rank 0 lost contact", echo=True, host="b"), end(1)]
    assert decide(story(lines), allowed=1) == Again("rank 1 on a was killed (SIGKILL)")


def test_processes_that_end_before_an_attempt_begins_are_counted_too() -> None:
    early = [LAUNCH, end(0), end(0), end(0)]
    assert isinstance(decide(story(early), allowed=3), Again)
    assert decide(story([*early, end(0)]), allowed=3) == Stop("rank 1 on a was killed (SIGKILL)", 4, 0)
    after = [LAUNCH, start(1, 0.0, 50), end(1), end(1), end(1), end(1)]
    assert isinstance(decide(story(after), allowed=3), Stop)


def test_one_loss_that_two_machines_tell_of_is_one() -> None:
    lines = [LAUNCH, start(1, 0.0, 50), end(1), end(1, host="b", echo=True)]
    assert used(story(lines)) == 0


def test_a_launch_by_somebody_begins_the_count_anew() -> None:
    four = [LAUNCH, *[line for n in range(1, 5) for line in (start(n, 0.0), end(n))]]
    assert isinstance(decide(story([*four, LAUNCH, start(5, 0.0), end(5)]), allowed=3), Again)


def test_machines_that_come_cost_no_restart() -> None:
    lines = [LAUNCH, start(1, 0.0), start(2, 0.0, hosts=("a", "b")), start(3, 0.0), end(3)]
    assert used(story(lines)) == 0


def test_a_person_is_told_why_from_where_and_how_often() -> None:
    lines = [LAUNCH, start(1, 0.0), end(1), start(2, 0.0, 50)]
    assert told(story(lines), 3) == (
        "rank 1 on a was killed (SIGKILL); starting again from the checkpoint of step 50 (1 of 3 without a new one)"
    )
    assert told(story(lines[:2]), 3) == "", "somebody began it, and knows"
    assert "starting again from the beginning (1 of 3" in told(story([*lines[:3], start(2, 0.0)]), 3)


def test_a_person_is_told_who_is_gone_and_who_has_come() -> None:
    both, one = ("a", "b"), ("a",)
    lost_b = [LAUNCH, start(1, 0.0, hosts=both), end(1, "rank 0 lost contact", echo=True), start(2, 0.0, 50, one)]
    assert told(story(lost_b), 3) == (
        "rank 0 lost contact; b is gone, training goes on with 1 machine; "
        "starting again from the checkpoint of step 50 (1 of 3 without a new one)"
    )
    back = [*lost_b, start(3, 0.0, 60, both)]
    assert told(story(back), 3) == (
        "b has joined, training goes on with 2 machines; starting again from the checkpoint of step 60"
    )
