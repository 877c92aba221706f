from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.spec.statistics.interval import mean_interval
from pipeline.spec.statistics.power import holm, shared_confidence, smallest_difference


def test_a_difference_of_that_size_is_seen_by_the_promised_share_of_test_sets() -> None:
    generator = np.random.default_rng(0)
    size = smallest_difference(generator.normal(size=400), 0.95)
    seen = sum(mean_interval(generator.normal(size, 1.0, size=400), 0.95, 400, seed=i).low > 0 for i in range(500))
    assert 0.75 <= seen / 500 <= 0.85


def test_four_times_the_samples_see_half_the_difference() -> None:
    few = np.tile([1.0, -1.0, 0.0, 0.0], 50)
    assert smallest_difference(np.tile(few, 4), 0.95) == pytest.approx(smallest_difference(few, 0.95) / 2, rel=0.01)


def test_equal_answers_on_few_samples_do_not_show_that_models_are_equal() -> None:
    assert smallest_difference(np.zeros(20), 0.95) > 0.2
    assert smallest_difference(np.zeros(20), 0.95) > smallest_difference(np.zeros(2000), 0.95) > 0


def test_one_sample_shows_nothing() -> None:
    assert smallest_difference(np.zeros(1), 0.95) == math.inf


def test_many_looks_make_each_count_less() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    assert shared_confidence(0.95, 5) == pytest.approx(0.99)
    assert shared_confidence(0.95, 0) == pytest.approx(0.95)


def test_twenty_looks_at_nothing_raise_a_false_alarm_as_seldom_as_one() -> None:
    generator = np.random.default_rng(1)
    alarms = sum(min(holm(list(generator.random(20)))) < 0.05 for _ in range(2000))
    assert alarms / 2000 < 0.065
