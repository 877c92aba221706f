from __future__ import annotations

from typing import Literal

import pytest

from train.schedule import learning_rate


def rates(total: int, warmup: float, kind: Literal["cosine", "constant"] = "cosine") -> list[float]:
    return [learning_rate(step, total, peak=2.0, warmup=warmup, kind=kind) for step in range(total)]


def test_it_rises_in_equal_steps_to_the_peak_and_never_starts_at_zero() -> None:
    assert rates(100, 0.04)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_the_cosine_only_falls_after_the_warm_up_and_ends_near_zero() -> None:
    falling = rates(100, 0.1)[10:]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 2.0
    assert 0 < falling[-1] < 0.01
    assert falling[45] == pytest.approx(1.0)


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert set(rates(100, 0.1, "constant")[9:]) == {2.0}


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rates(10, 0.0)[0] == 2.0


def test_a_warm_up_over_all_steps_ends_at_the_peak() -> None:
    assert rates(10, 1.0) == pytest.approx([0.2 * i for i in range(1, 11)])


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_a_single_step_is_trained_at_the_peak(kind: Literal["cosine", "constant"], warmup: float) -> None:
    assert rates(1, warmup, kind) == [2.0]
