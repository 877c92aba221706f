from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test  # type: ignore[import-untyped]

from pipeline.spec.statistics import paired
from pipeline.spec.statistics.paired import McNemar, binomial_two_sided, mcnemar, permutation_p_value


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


def _mean(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], axis: int) -> object:
    return np.mean(values, axis=axis)


@pytest.mark.parametrize("shift", [0.0, 0.15, 0.6])
def test_the_permutation_test_agrees_with_scipys(shift: float) -> None:
    difference = np.random.default_rng(4).normal(shift, 1.0, size=60)
    expected = permutation_test(
        (difference,), _mean, permutation_type="samples", n_resamples=100_000, vectorized=True, rng=0
    ).pvalue
    assert permutation_p_value(difference, 100_000, seed=0) == pytest.approx(expected, abs=4e-3)


@pytest.mark.parametrize(("only_candidate", "only_baseline"), [(9, 1), (30, 18), (5, 5)])
def test_of_right_and_wrong_it_says_what_mcnemar_says(only_candidate: int, only_baseline: int) -> None:
    difference = np.repeat([1.0, -1.0, 0.0], [only_candidate, only_baseline, 100])
    exact = binomial_two_sided(only_candidate, only_baseline)
    assert permutation_p_value(difference, 200_000, seed=0) == pytest.approx(exact, abs=4e-3)


def test_counting_equal_differences_says_what_flipping_each_says(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = np.repeat([2.0, 1.0, -1.0], [6, 17, 14])
    counted = permutation_p_value(difference, 50_000, seed=0)
    monkeypatch.setattr(paired, "_FEW_VALUES", 0)
    assert permutation_p_value(difference, 50_000, seed=0) == pytest.approx(counted, abs=0.01)


def test_where_nothing_differs_there_is_nothing_to_tell() -> None:
    assert permutation_p_value(np.zeros(5), 100, seed=0) == 1.0


def test_it_is_never_more_sure_than_its_resamples_allow() -> None:
    assert permutation_p_value(np.ones(400), 99, seed=0) == 0.01
