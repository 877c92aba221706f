from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from scipy.stats import binomtest, ttest_1samp  # type: ignore[import-untyped]

from benchmarks.coverage import accuracy_coverage, coverages, measure_tail
from pipeline.statistics.aggregates import Auc, ExplainedVariance, Floats, Mean, RootMean, Spearman, Statistic
from pipeline.statistics.intervals import (
    Interval,
    difference_interval,
    metric_interval,
    paired_proportions_interval,
    proportion_interval,
)


def _bounds(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None
    return interval.low, interval.high


def _score(only_first: int, only_second: int, count: int, difference: float) -> float:
    """Return the score statistic by its definition, with the most likely proportions of this difference."""

    def surprise(loss: float) -> float:
        gain = loss + difference
        counts, chances = (only_first, only_second, count - only_first - only_second), (gain, loss, 1 - gain - loss)
        return -sum(n * math.log(max(p, 1e-300)) for n, p in zip(counts, chances, strict=True) if n)

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    loss = float(minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x)
    variance = (2 * loss + difference - difference**2) / count
    return ((only_first - only_second) / count - difference) / math.sqrt(variance)


@pytest.mark.parametrize(("only_first", "only_second", "count"), [(1, 0, 44), (7, 2, 50), (20, 31, 300)])
def test_paired_interval_holds_differences_that_the_score_test_accepts(
    only_first: int, only_second: int, count: int
) -> None:
    interval = paired_proportions_interval(only_first, only_second, count, 0.95)
    assert _score(only_first, only_second, count, interval.low) == pytest.approx(1.96, abs=1e-3)
    assert _score(only_first, only_second, count, interval.high) == pytest.approx(-1.96, abs=1e-3)


def test_equal_answers_on_few_samples_leave_room_for_a_difference() -> None:
    right = Mean(np.ones(30))
    low, high = _bounds(difference_interval(right, Mean(np.ones(30)), 0.95))
    assert (low, high) == pytest.approx((-0.1135, 0.1135), abs=1e-4)
    assert _bounds(difference_interval(Mean(np.ones(1000)), Mean(np.ones(1000)), 0.95))[0] > -0.004


def test_swapping_the_models_negates_the_interval() -> None:
    there, back = paired_proportions_interval(7, 2, 50, 0.9), paired_proportions_interval(2, 7, 50, 0.9)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


@pytest.mark.parametrize("hits", [0, 1, 15, 29, 30])
def test_interval_of_a_proportion_lies_within_the_exact_one(hits: int) -> None:
    interval, exact = proportion_interval(hits, 30, 0.95), binomtest(hits, 30).proportion_ci(0.95)
    assert exact.low <= interval.low <= hits / 30 <= interval.high <= exact.high
    assert interval.high - interval.low > 0.8 * (exact.high - exact.low)


def test_without_skewness_the_interval_of_a_mean_is_students() -> None:
    half = np.random.default_rng(0).normal(size=20)
    values = np.concatenate([half, -half])
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert _bounds(metric_interval(Mean(values), 0.95)) == pytest.approx((expected.low, expected.high), rel=0.01)


def test_rare_large_losses_widen_the_lower_side() -> None:
    difference = np.concatenate([np.full(38, 0.1), [-2.0, -3.0]]) + np.linspace(0, 0.01, 40)
    interval = difference_interval(Mean(difference), Mean(np.zeros(40)), 0.95)
    assert interval is not None
    assert interval.estimate - interval.low > 1.2 * (interval.high - interval.estimate)


def test_samples_without_a_difference_are_no_degrees_of_freedom() -> None:
    few = np.concatenate([[0.3, -0.2, 0.1], np.zeros(60)])
    low, high = _bounds(difference_interval(Mean(few), Mean(np.zeros(63)), 0.95))
    expected = ttest_1samp(few, 0.0).confidence_interval(0.95)
    assert high - low > 2 * (expected.high - expected.low)


def test_unbounded_metric_without_differences_has_no_interval() -> None:
    errors = np.random.default_rng(1).exponential(size=500)
    assert difference_interval(Mean(errors), Mean(errors), 0.95) is None
    assert difference_interval(RootMean(errors), RootMean(errors), 0.95) is None
    one_differs = errors + np.eye(1, 500)[0]
    assert difference_interval(Mean(one_differs), Mean(errors), 0.95) is None


@pytest.mark.parametrize("statistic", [Mean(np.full(40, 0.5), (0.0, 1.0)), Auc(np.arange(40.0), np.arange(40) >= 20)])
def test_bounded_metric_without_differences_has_an_interval(statistic: Statistic) -> None:
    low, high = _bounds(difference_interval(statistic, statistic, 0.95))
    assert -low == high
    assert 0.05 < high < 0.2


def test_undefined_metrics_have_no_interval() -> None:
    values = np.arange(10.0)
    with np.errstate(all="ignore"):
        assert metric_interval(Auc(values, values > 99), 0.95) is None
    assert metric_interval(ExplainedVariance(values, np.full(10, 2.5)), 0.95) is None
    assert metric_interval(Spearman(np.ones(10), values), 0.95) is None
    assert metric_interval(RootMean(np.ones(1)), 0.95) is None, "one sample"
    assert metric_interval(Mean(np.array([math.nan, 1.0, 2.0])), 0.95) is None


def test_intervals_stay_within_the_limits_of_the_metric() -> None:
    scores = np.random.default_rng(2).random(40)
    scores[:3] = 0.0, 1.0, 0.99
    low, high = _bounds(metric_interval(Mean(np.where(scores < 0.1, scores, 1.0), (0.0, 1.0)), 0.95))
    assert 0 <= low < high <= 1


@pytest.mark.parametrize("samples", [30, 100])
def test_accuracy_is_covered_and_rarely_passed_by_mistake(samples: int) -> None:
    """Coverage is exact over all test sets; it is higher near 1, where differences are rare."""
    for accuracy, correlation, margin in product((0.5, 0.9, 0.99), (0.0, 0.8), (0.0, 0.01, 0.05)):
        result = accuracy_coverage(samples, accuracy, correlation, margin)
        assert result is None or (result.covered >= 0.93 and result.false_passes <= 0.035)


@pytest.mark.parametrize("errors", ["normal", "log-normal"])
def test_ordinary_errors_are_rarely_inconclusive(errors: str) -> None:
    tail = measure_tail(errors, 400, trials=300)
    assert tail.inconclusive < 0.02
    assert tail.false_passes_of_gate <= 0.05


def test_few_large_errors_promise_nothing_once_they_are_seen() -> None:
    """In a sixtieth of such test sets there is none, and no rule can see it."""
    tail = measure_tail("1 %, 50 times as large", 400, trials=300)
    assert tail.false_passes_of_gate < tail.false_passes < 0.1
    assert measure_tail("1 %, 50 times as large", 1600, trials=300).false_passes_of_gate <= 0.01


@pytest.mark.long
@pytest.mark.parametrize("samples", [30, 100, 300, 1000])
@pytest.mark.parametrize("metric", ["accuracy", "AUC", "NDCG", "MAE"])
def test_intervals_cover_and_rarely_pass_by_mistake(metric: str, samples: int) -> None:
    trials = 1000
    noise = (
        0.0 if metric == "accuracy" else 4 * math.sqrt(0.035 * 0.965 / trials)
    )  # 4 standard errors, for many settings
    for setting, result in coverages(metric, samples, trials):
        assert result.covered >= 0.93 - noise, setting
        assert result.false_passes <= 0.035 + noise, setting


def _root(squares: Floats) -> Statistic:
    return RootMean(squares**2)


@pytest.mark.parametrize("make", [_root, lambda values: Spearman(values, np.arange(300.0))])
def test_jackknife_and_derivatives_agree(make: Callable[[Floats], Statistic], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    first, second = (make(np.arange(300.0) + scale * generator.normal(size=300)) for scale in (60.0, 80.0))
    derived = _bounds(difference_interval(first, second, 0.95))
    monkeypatch.setattr("pipeline.statistics.intervals._MAX_JACKKNIFE_UNITS", 300)
    left_out = _bounds(difference_interval(first, second, 0.95))
    assert derived == pytest.approx(left_out, abs=0.1 * (left_out[1] - left_out[0]))
