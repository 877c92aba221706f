from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap, spearmanr  # type: ignore[import-untyped]
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error

from pipeline.contract.statistics import bootstrap as own_bootstrap
from pipeline.contract.statistics.bootstrap import (
    Auc,
    Average,
    CalibrationError,
    Explained,
    Floats,
    Interval,
    Mean,
    RootMean,
    Spearman,
    Statistic,
    aggregate_interval,
    contributions,
    value_of,
)
from pipeline.contract.statistics.significance import curve, expected_error

KINDS = ("rmse", "r2", "spearman", "auc", "ece", "mean", "macro")


def drawn(samples: int, seed: int = 5) -> tuple[Floats, Floats]:
    """True values and predictions, with ties."""
    generator = np.random.default_rng(seed)
    actual = np.round(generator.normal(size=samples), 1)
    return actual, np.round(actual + generator.normal(size=samples), 1)


def made(kind: str, actual: Floats, predicted: Floats) -> Statistic:
    errors = (predicted - actual) ** 2
    share = 1 / (1 + np.exp(-predicted))
    kinds: dict[str, Statistic] = {
        "rmse": RootMean(errors),
        "r2": Explained(errors, actual),
        "spearman": Spearman(predicted, actual),
        "auc": Auc(predicted, actual > 0.0),
        "ece": CalibrationError(share, (actual > 0).astype(np.float64)),
        "mean": Mean(errors),
        "macro": Average([Auc(predicted, actual > 0.0), Auc(predicted, actual > -0.5)]),
    }
    return kinds[kind]


def test_each_is_what_scipy_and_scikit_learn_say() -> None:
    actual, predicted = drawn(300)
    share = 1 / (1 + np.exp(-predicted))
    expected = {
        "rmse": root_mean_squared_error(actual, predicted),
        "r2": r2_score(actual, predicted),
        "spearman": spearmanr(actual, predicted).statistic,
        "auc": roc_auc_score(actual > 0.0, predicted),
        "ece": expected_error(curve(share, (actual > 0).astype(np.float64))),
    }
    for kind, value in expected.items():
        assert value_of(made(kind, actual, predicted)) == pytest.approx(value, abs=1e-12), kind


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_copies(kind: str) -> None:
    actual, predicted = drawn(60)
    counts = np.random.default_rng(0).integers(0, 4, size=60)
    weighted = made(kind, actual, predicted).values(counts[None].astype(np.float64))[0]
    assert weighted == pytest.approx(value_of(made(kind, np.repeat(actual, counts), np.repeat(predicted, counts))))


@pytest.mark.parametrize("kind", KINDS)
def test_an_influence_is_the_slope_of_the_value_by_a_samples_weight(kind: str) -> None:
    actual, predicted = drawn(80)
    statistic, step = made(kind, actual, predicted), 1e-6
    influence = statistic.influence()
    assert influence.mean() == pytest.approx(0.0, abs=1e-12)
    for i in (0, 7, 41, 79):
        weights = np.full((1, 80), 1 - step)
        weights[0, i] += 80 * step
        slope = (statistic.values(weights)[0] - value_of(statistic)) / step
        assert slope == pytest.approx(influence[i], abs=1e-3, rel=1e-3)


def scipys(kind: str, actual: Floats, first: Floats, second: Floats) -> Any:
    def difference(places: Floats) -> float:
        i = places.astype(np.int64)
        return value_of(made(kind, actual[i], first[i])) - value_of(made(kind, actual[i], second[i]))

    data = (np.arange(len(actual), dtype=np.float64),)
    return bootstrap(data, difference, vectorized=False, n_resamples=20_000, method="BCa", rng=2).confidence_interval


def test_an_interval_of_one_model_is_scipys() -> None:
    squares = 0.01 * np.random.default_rng(9).exponential(size=150)

    def root(values: Floats, axis: int) -> Any:
        return np.sqrt(values.mean(axis=axis))

    expected = bootstrap((squares,), root, n_resamples=20_000, method="BCa", rng=2, batch=2000).confidence_interval
    found = aggregate_interval(RootMean(squares), None, 0.95, 20_000, seed=0)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_the_paired_interval_is_scipys(kind: str) -> None:
    generator = np.random.default_rng(9)
    actual = 0.1 * generator.normal(size=150)
    first, second = (actual + scale * generator.normal(size=150) for scale in (0.03, 0.033))
    expected = scipys(kind, actual, first, second)
    found = aggregate_interval(made(kind, actual, first), made(kind, actual, second), 0.95, 40_000, seed=0)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=1e-3)


@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_influences_give_the_interval_that_resampling_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not of the calibration error: its value is no smooth function of the samples where a bin has no gap.
    generator = np.random.default_rng(3)
    actual = generator.normal(size=800)
    pair = [made(kind, actual, actual + scale * generator.normal(size=800)) for scale in (1.0, 1.2)]
    drawn = aggregate_interval(pair[0], pair[1], 0.95, 1000, seed=0)
    monkeypatch.setattr(own_bootstrap, "_MOST_DRAWS", 0)
    linear = aggregate_interval(pair[0], pair[1], 0.95, 1000, seed=0)
    assert drawn is not None and linear is not None
    assert linear.estimate == pytest.approx(drawn.estimate)
    width = drawn.high - drawn.low
    assert [linear.low, linear.high] == pytest.approx([drawn.low, drawn.high], abs=0.15 * width)


def test_what_is_undefined_has_no_interval() -> None:
    values = np.arange(10.0)
    assert aggregate_interval(Auc(values, values > 99), None, 0.95, 200, 0) is None
    assert aggregate_interval(Explained(values, np.full(10, 2.5)), None, 0.95, 200, 0) is None
    assert aggregate_interval(Spearman(np.ones(10), values), None, 0.95, 200, 0) is None
    assert aggregate_interval(RootMean(np.ones(1)), None, 0.95, 200, 0) is None, "one sample"
    one_positive = Auc(values, values == 4)
    assert aggregate_interval(one_positive, None, 0.95, 200, 0) is None, "undefined on a third of the resamples"


def test_a_model_does_not_differ_from_itself() -> None:
    actual, predicted = drawn(50)
    twin = made("spearman", actual, predicted)
    assert aggregate_interval(twin, made("spearman", actual, predicted), 0.95, 200, 0) == Interval(0.0, 0.0, 0.0)
    assert not contributions(twin, twin).any()


def test_an_error_is_better_the_smaller_it_is() -> None:
    actual, predicted = drawn(50)
    near, far = RootMean((predicted - actual) ** 2), RootMean((predicted - actual - 3) ** 2)
    found = aggregate_interval(near, far, 0.95, 200, 0, better=-1)
    assert found is not None and found.low > 0


def test_ten_thousand_resamples_of_a_hundred_thousand_samples_take_seconds() -> None:
    generator = np.random.default_rng(8)
    actual = generator.normal(size=100_000)
    pair = [made("spearman", actual, actual + scale * generator.normal(size=100_000)) for scale in (1.0, 1.01)]
    began = time.process_time()
    found = aggregate_interval(pair[0], pair[1], 0.95, 10_000, seed=0)
    assert time.process_time() - began < 5
    assert found is not None and found.low < found.estimate < found.high


def coverage(kind: str, trials: int, samples: int) -> float:
    """Share of intervals that hold what a very large sample says is true."""
    truth = value_of(made(kind, *_pairs(400_000, 99)))
    hits = 0
    for trial in range(trials):
        found = aggregate_interval(made(kind, *_pairs(samples, trial)), None, 0.95, 500, seed=trial)
        hits += found is not None and found.low <= truth <= found.high
    return hits / trials


def _pairs(samples: int, seed: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(seed)
    actual = generator.normal(size=samples)
    return actual, actual + generator.normal(size=samples)


def test_the_interval_covers_the_truth_about_as_often_as_it_promises() -> None:
    assert 0.88 <= coverage("rmse", 100, 150) <= 1.0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_the_interval_covers_the_truth_as_often_as_it_promises(kind: str) -> None:
    assert 0.93 <= coverage(kind, 1000, 200) <= 0.97
