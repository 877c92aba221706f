"""Whether a batch is quick, whatever else the machine is at."""

from __future__ import annotations

from serve.pace import Pace


def test_what_never_ran_is_not_quick() -> None:
    assert not Pace().quick(7)


def test_a_batch_that_was_interrupted_now_and_then_stays_quick() -> None:
    pace = Pace()
    for _ in range(50):
        for seconds in (50e-6, 5e-3, 4e-3, 80e-6):
            pace.learn(7, 1, seconds)
            assert pace.quick(7)


def test_a_batch_that_became_slow_is_quick_no_more() -> None:
    pace = Pace()
    pace.learn(7, 1, 50e-6)
    for _ in range(30):
        pace.learn(7, 1, 2e-3)
    assert not pace.quick(7)


def test_sizes_are_known_apart() -> None:
    pace = Pace()
    pace.learn(7, 1, 50e-6)
    assert not pace.quick(8)
