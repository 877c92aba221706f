"""Whether a batch is quick, whatever else the machine is at."""

from __future__ import annotations

import pytest

from serve.runtime.pace import Pace


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


def test_a_queue_lasts_as_long_as_all_of_the_service_takes_for_a_batch() -> None:
    pace = Pace()
    for number in range(4):
        pace.learn(5, 10, 0.01)
        pace.taken(10, number * 0.05, more=True)
    assert pace.seconds(100) == pytest.approx(0.5), "the model alone would take 0.1 s"


def test_what_a_queue_took_is_forgotten_when_nobody_waits() -> None:
    pace = Pace()
    pace.learn(5, 10, 0.01)
    pace.taken(10, 0.0, more=True)
    pace.taken(10, 60.0, more=True)
    assert pace.seconds(1) == pytest.approx(6)
    pace.taken(1, 61.0, more=False)
    pace.taken(1, 99.0, more=True)
    assert pace.seconds(100) == pytest.approx(0.1)


def test_a_long_turn_of_another_process_is_no_long_run() -> None:
    pace = Pace()
    pace.learn(5, 1, 1e-4, 1e-4)
    pace.learn(5, 1, 1.0, 1e-4)
    assert pace.quick(5), "it had the processor for a moment only"
    pace.learn(5, 1, 1.0, 0.9)
    assert not pace.quick(5)


def test_a_run_that_waits_for_its_turn_in_a_thread_is_known_to_be_quick() -> None:
    pace = Pace()
    for _ in range(3):
        pace.learn(5, 1, 0.02, 1e-4)
    assert pace.quick(5)
    assert pace.seconds(1) == pytest.approx(0.02), "who waits for it waits for all of it"
