from __future__ import annotations

import pytest

from pipeline.pace import Pace, clock


def test_what_is_left_takes_as_long_as_the_steps_seen() -> None:
    pace = Pace()
    assert pace.seconds_left(100) is None
    for now, step in ((0.0, 10), (1.0, 10), (5.0, 20)):
        pace.saw(step, now)
    assert pace.seconds_left(100) == pytest.approx(40)
    assert pace.seconds_left(20) == 0


def test_a_resumed_run_is_not_thought_fast_for_where_it_started() -> None:
    pace = Pace()
    pace.saw(5000, 0.0)
    assert pace.seconds_left(10_000) is None
    pace.saw(5010, 10.0)
    assert pace.seconds_left(5110) == pytest.approx(100)


def test_only_the_last_minutes_count() -> None:
    pace = Pace()
    for second in range(0, 1000, 10):  # a step a second, and then ten
        pace.saw(second if second < 500 else 500 + 10 * (second - 500), float(second))
    assert pace.seconds_left(5400 + 1000) == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "0:00"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_times_are_read_as_on_a_clock(seconds: float, told: str) -> None:
    assert clock(seconds) == told
