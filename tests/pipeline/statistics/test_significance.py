from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test  # type: ignore[import-untyped]
from sklearn.metrics import brier_score_loss

from pipeline.statistics import significance
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import difference_interval
from pipeline.statistics.significance import (
    McNemar,
    binomial_two_sided_p_value,
    bonferroni_confidence,
    brier_scores,
    calibration_curve,
    confidence_text,
    detectable_difference,
    expected_calibration_error,
    holm,
    mcnemar,
    permutation_p_value,
    repeated_confidence,
)


def test_brier_score_of_two_classes_is_twice_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    second, actual = generator.random(200), generator.integers(2, size=200)
    scores = brier_scores(np.stack([1 - second, second], axis=1), actual)
    assert scores.mean() == pytest.approx(2 * brier_score_loss(actual, second))
    assert brier_scores(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 0])).tolist() == [0.0, 2.0]


def test_calibrated_answers_have_almost_no_error() -> None:
    generator = np.random.default_rng(1)
    stated = generator.random(100_000)
    right = (generator.random(100_000) < stated).astype(np.float64)
    assert expected_calibration_error(calibration_curve(stated, right)) < 0.01


def test_calibration_error_is_weighted_by_samples() -> None:
    stated, right = np.array([0.9] * 6 + [0.1] * 2), np.array([1.0] * 3 + [0.0] * 3 + [0.0] * 2)
    bins = calibration_curve(stated, right, bins=10)
    assert [one.samples for one in bins] == [2, 6]
    assert [one.confidence for one in bins] == pytest.approx([0.1, 0.9])
    assert [one.accuracy for one in bins] == [0.0, 0.5]
    assert expected_calibration_error(bins) == pytest.approx((6 * 0.4 + 2 * 0.1) / 8)


def test_confidence_of_one_is_in_the_last_bin() -> None:
    (last,) = calibration_curve(np.array([1.0]), np.array([1.0]), bins=4)
    assert (last.low, last.high) == (0.75, 1.0)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (3, 3), (1, 9), (40, 17), (3000, 2801), (100_000, 99_000)])
def test_binomial_test_agrees_with_scipy(a: int, b: int) -> None:
    expected = binomtest(a, a + b).pvalue if a + b else 1.0
    assert binomial_two_sided_p_value(a, b) == pytest.approx(expected, rel=1e-7)
    assert binomial_two_sided_p_value(b, a) == binomial_two_sided_p_value(a, b)


def test_mcnemar_counts_samples_only_one_model_gets_right() -> None:
    candidate = np.array([1.0, 1, 1, 0, 0, 1])
    baseline = np.array([1.0, 0, 0, 1, 0, 0])
    assert mcnemar(candidate, baseline) == McNemar(p_value=0.625, only_candidate=3, only_baseline=1)


def test_mcnemar_needs_right_or_wrong_values() -> None:
    assert mcnemar(np.array([0.5, 1.0]), np.array([0.0, 1.0])) is None


def _mean(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], axis: int) -> object:
    return np.mean(values, axis=axis)


@pytest.mark.parametrize("shift", [0.0, 0.15, 0.6])
def test_permutation_test_agrees_with_scipy(shift: float) -> None:
    difference = np.random.default_rng(4).normal(shift, 1.0, size=60)
    expected = permutation_test(
        (difference,), _mean, permutation_type="samples", n_resamples=20_000, vectorized=True, rng=0
    ).pvalue
    assert permutation_p_value(difference, 100_000) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("only_candidate", "only_baseline"), [(9, 1), (30, 18), (5, 5)])
def test_permutation_test_agrees_with_mcnemar_on_right_and_wrong(only_candidate: int, only_baseline: int) -> None:
    difference = np.repeat([1.0, -1.0, 0.0], [only_candidate, only_baseline, 100])
    exact = binomial_two_sided_p_value(only_candidate, only_baseline)
    assert permutation_p_value(difference, 200_000) == pytest.approx(exact, abs=4e-3)


def test_counting_equal_differences_agrees_with_flipping_each(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = np.repeat([2.0, 1.0, -1.0], [6, 17, 14])
    counted = permutation_p_value(difference, 50_000)
    monkeypatch.setattr(significance, "_MAX_DISTINCT", 0)
    assert permutation_p_value(difference, 50_000) == pytest.approx(counted, abs=0.01)


def test_no_difference_has_a_p_value_of_one() -> None:
    assert permutation_p_value(np.zeros(5), 100) == 1.0


def test_p_value_is_limited_by_the_resamples() -> None:
    assert permutation_p_value(np.ones(400), 99) == 0.01


def test_detectable_difference_is_detected_with_the_promised_power() -> None:
    generator = np.random.default_rng(0)
    size = detectable_difference(generator.normal(size=400), 0.95)
    pairs = (
        difference_interval(Mean(generator.normal(size, 1.0, size=400)), Mean(np.zeros(400)), 0.95) for _ in range(500)
    )
    seen = sum(interval is not None and interval.low > 0 for interval in pairs)
    assert 0.75 <= seen / 500 <= 0.85


def test_four_times_the_samples_detect_half_the_difference() -> None:
    few = np.tile([1.0, -1.0, 0.0, 0.0], 50)
    assert detectable_difference(np.tile(few, 4), 0.95) == pytest.approx(detectable_difference(few, 0.95) / 2, rel=0.01)


def test_few_equal_answers_do_not_prove_equality() -> None:
    assert detectable_difference(np.zeros(20), 0.95) > 0.2
    assert detectable_difference(np.zeros(20), 0.95) > detectable_difference(np.zeros(2000), 0.95) > 0


def test_one_sample_detects_nothing() -> None:
    assert detectable_difference(np.zeros(1), 0.95) == math.inf


def test_corrections_for_multiple_comparisons() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    assert bonferroni_confidence(0.95, 5) == pytest.approx(0.99)
    assert bonferroni_confidence(0.95, 0) == pytest.approx(0.95)


def test_holm_keeps_the_false_alarm_rate() -> None:
    generator = np.random.default_rng(1)
    alarms = sum(min(holm(list(generator.random(20)))) < 0.05 for _ in range(2000))
    assert alarms / 2000 < 0.065


def test_later_comparisons_on_a_test_set_have_wider_intervals() -> None:
    levels = [repeated_confidence(0.95, number) for number in range(1, 2000)]
    assert levels[0] == 0.95, "the first one is as configured"
    assert [confidence_text(level) for level in levels[:5]] == ["95%", "98.3%", "99.17%", "99.5%", "99.67%"]
    assert levels == sorted(levels)
    assert 1.99 * 0.05 < sum(1 - level for level in levels) < 2 * 0.05


@pytest.mark.parametrize(
    ("confidence", "text"), [(0.9, "90%"), (0.975, "97.5%"), (0.999, "99.9%"), (0.99996, "99.996%")]
)
def test_confidence_is_written_with_the_digits_it_needs(confidence: float, text: str) -> None:
    assert confidence_text(confidence) == text
