from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest  # type: ignore[import-untyped]

from evaluate import statistics
from evaluate.statistics import Interval, McNemar, binomial_two_sided, bootstrap_interval, mcnemar


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (3, 3), (1, 9), (40, 17), (3000, 2801), (100_000, 99_000)])
def test_the_exact_test_agrees_with_scipy(a: int, b: int) -> None:
    expected = binomtest(a, a + b).pvalue if a + b else 1.0
    assert binomial_two_sided(a, b) == pytest.approx(expected, rel=1e-7)
    assert binomial_two_sided(b, a) == binomial_two_sided(a, b)


def test_mcnemar_counts_only_samples_that_one_alone_gets_right() -> None:
    candidate = np.array([1.0, 1, 1, 0, 0, 1])
    baseline = np.array([1.0, 0, 0, 1, 0, 0])
    assert mcnemar(candidate, baseline) == McNemar(p_value=0.625, only_candidate=3, only_baseline=1)


def test_mcnemar_does_not_apply_to_values_between_right_and_wrong() -> None:
    assert mcnemar(np.array([0.5, 1.0]), np.array([0.0, 1.0])) is None


def test_equal_predictions_have_a_difference_of_exactly_zero() -> None:
    assert bootstrap_interval(np.zeros(40), 0.95, 1000, seed=0) == Interval(0.0, 0.0, 0.0)


def test_the_interval_is_the_same_for_the_same_seed_and_differs_for_another() -> None:
    difference = np.random.default_rng(1).normal(size=200)
    first = bootstrap_interval(difference, 0.95, 1000, seed=3)
    assert bootstrap_interval(difference, 0.95, 1000, seed=3) == first
    assert bootstrap_interval(difference, 0.95, 1000, seed=4) != first


def test_counting_few_values_gives_the_interval_that_drawing_samples_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = np.repeat([-1.0, 0.0, 1.0], [10, 270, 40])
    counted = bootstrap_interval(difference, 0.95, 20_000, seed=0)
    monkeypatch.setattr(statistics, "_FEW_VALUES", 0)
    drawn = bootstrap_interval(difference, 0.95, 20_000, seed=0)
    assert drawn.estimate == counted.estimate == pytest.approx(30 / 320)
    assert [drawn.low, drawn.high] == pytest.approx([counted.low, counted.high], abs=0.004)


def test_the_interval_matches_the_normal_one_where_theory_says_so() -> None:
    difference = np.random.default_rng(5).normal(0.1, 1.0, size=2000)
    found = bootstrap_interval(difference, 0.9, 20_000, seed=0)
    half = 1.6449 * difference.std() / np.sqrt(2000)
    assert [found.low, found.high] == pytest.approx([found.estimate - half, found.estimate + half], abs=0.0015)


def test_the_interval_covers_the_truth_as_often_as_it_promises() -> None:
    generator = np.random.default_rng(11)
    hits = 0
    for _ in range(300):
        sample = generator.choice([-1.0, 0.0, 1.0], size=200, p=[0.1, 0.7, 0.2])
        interval = bootstrap_interval(sample, 0.9, 500, seed=0)
        hits += interval.low <= 0.1 <= interval.high
    assert 0.85 <= hits / 300 <= 0.95


def test_drawing_in_chunks_makes_every_resample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_ELEMENTS", 1000)
    assert statistics._chunks(25, 100) == [10, 10, 5]
    assert statistics._chunks(3, 5000) == [1, 1, 1]
