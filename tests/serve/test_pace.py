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


def test_one_long_run_makes_its_size_unsafe_for_the_event_loop_and_no_other() -> None:
    pace = Pace()
    for size in (5, 6):
        pace.learn(size, 1, 1e-4)
    assert pace.quick(5)
    pace.learn(5, 1, 1.0)
    for _ in range(999):
        pace.learn(5, 1, 1e-4)
        assert not pace.quick(5)
        assert pace.quick(6)
    pace.learn(5, 1, 1e-4)
    assert pace.quick(5)


def test_a_turn_of_another_process_is_no_reason_for_a_thread() -> None:
    pace = Pace()
    pace.learn(5, 1, 1e-4)
    pace.learn(5, 1, 0.01)
    assert pace.quick(5)
