from __future__ import annotations

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
    ExplainedVariance,
    Floats,
    Interval,
    Mean,
    RootMean,
    Spearman,
    Statistic,
    aggregate_interval,
    contributions,
    point_estimate,
)
from pipeline.contract.statistics.significance import calibration_curve, expected_calibration_error

KINDS = ("rmse", "r2", "spearman", "auc", "ece", "mean", "macro")


def drawn(samples: int, seed: int = 5) -> tuple[Floats, Floats]:
    """True values and predictions, with ties."""
    generator = np.random.default_rng(seed)
    actual = np.round(generator.normal(size=samples), 1)
    return actual, np.round(actual + generator.normal(size=samples), 1)


def make_statistic(kind: str, actual: Floats, predicted: Floats) -> Statistic:
    errors = (predicted - actual) ** 2
    share = 1 / (1 + np.exp(-predicted))
    kinds: dict[str, Statistic] = {
        "rmse": RootMean(errors),
        "r2": ExplainedVariance(errors, actual),
        "spearman": Spearman(predicted, actual),
        "auc": Auc(predicted, actual > 0.0),
        "ece": CalibrationError(share, (actual > 0).astype(np.float64)),
        "mean": Mean(errors),
        "macro": Average([Auc(predicted, actual > 0.0), Auc(predicted, actual > -0.5)]),
    }
    return kinds[kind]


def test_statistics_agree_with_scipy_and_scikit_learn() -> None:
    actual, predicted = drawn(300)
    share = 1 / (1 + np.exp(-predicted))
    expected = {
        "rmse": root_mean_squared_error(actual, predicted),
        "r2": r2_score(actual, predicted),
        "spearman": spearmanr(actual, predicted).statistic,
        "auc": roc_auc_score(actual > 0.0, predicted),
        "ece": expected_calibration_error(calibration_curve(share, (actual > 0).astype(np.float64))),
    }
    for kind, value in expected.items():
        assert point_estimate(make_statistic(kind, actual, predicted)) == pytest.approx(value, abs=1e-12), kind


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_repeated_samples(kind: str) -> None:
    actual, predicted = drawn(60)
    counts = np.random.default_rng(0).integers(0, 4, size=60)
    weighted = make_statistic(kind, actual, predicted).values(counts[None].astype(np.float64))[0]
    assert weighted == pytest.approx(
        point_estimate(make_statistic(kind, np.repeat(actual, counts), np.repeat(predicted, counts)))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_influence_is_the_derivative_by_the_weight(kind: str) -> None:
    actual, predicted = drawn(80)
    statistic, step = make_statistic(kind, actual, predicted), 1e-6
    influence = statistic.influence()
    assert influence.mean() == pytest.approx(0.0, abs=1e-12)
    for i in (0, 7, 41, 79):
        weights = np.full((1, 80), 1 - step)
        weights[0, i] += 80 * step
        slope = (statistic.values(weights)[0] - point_estimate(statistic)) / step
        assert slope == pytest.approx(influence[i], abs=1e-3, rel=1e-3)


def scipys(kind: str, actual: Floats, first: Floats, second: Floats) -> Any:
    def difference(places: Floats) -> float:
        i = places.astype(np.int64)
        return point_estimate(make_statistic(kind, actual[i], first[i])) - point_estimate(
            make_statistic(kind, actual[i], second[i])
        )

    data = (np.arange(len(actual), dtype=np.float64),)
    return bootstrap(data, difference, vectorized=False, n_resamples=5_000, method="BCa", rng=2).confidence_interval


def test_interval_of_one_model_agrees_with_scipy() -> None:
    squares = 0.01 * np.random.default_rng(9).exponential(size=150)

    def root(values: Floats, axis: int) -> Any:
        return np.sqrt(values.mean(axis=axis))

    expected = bootstrap((squares,), root, n_resamples=20_000, method="BCa", rng=2, batch=2000).confidence_interval
    found = aggregate_interval(RootMean(squares), None, 0.95, 20_000, seed=0)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_paired_interval_agrees_with_scipy(kind: str) -> None:
    generator = np.random.default_rng(9)
    actual = 0.1 * generator.normal(size=150)
    first, second = (actual + scale * generator.normal(size=150) for scale in (0.03, 0.033))
    expected = scipys(kind, actual, first, second)
    found = aggregate_interval(
        make_statistic(kind, actual, first), make_statistic(kind, actual, second), 0.95, 10_000, seed=0
    )
    assert found is not None
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=2e-3)


@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_influences_and_resampling_give_the_same_interval(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not of the calibration error: its value is no smooth function of the samples where a bin has no gap.
    generator = np.random.default_rng(3)
    actual = generator.normal(size=800)
    pair = [make_statistic(kind, actual, actual + scale * generator.normal(size=800)) for scale in (1.0, 1.2)]
    drawn = aggregate_interval(pair[0], pair[1], 0.95, 1000, seed=0)
    monkeypatch.setattr(own_bootstrap, "_MAX_AGGREGATE_DRAWS", 0)
    linear = aggregate_interval(pair[0], pair[1], 0.95, 1000, seed=0)
    assert drawn is not None and linear is not None
    assert linear.estimate == pytest.approx(drawn.estimate)
    width = drawn.high - drawn.low
    assert [linear.low, linear.high] == pytest.approx([drawn.low, drawn.high], abs=0.15 * width)


def test_undefined_statistic_has_no_interval() -> None:
    values = np.arange(10.0)
    assert aggregate_interval(Auc(values, values > 99), None, 0.95, 200, 0) is None
    assert aggregate_interval(ExplainedVariance(values, np.full(10, 2.5)), None, 0.95, 200, 0) is None
    assert aggregate_interval(Spearman(np.ones(10), values), None, 0.95, 200, 0) is None
    assert aggregate_interval(RootMean(np.ones(1)), None, 0.95, 200, 0) is None, "one sample"
    one_positive = Auc(values, values == 4)
    assert aggregate_interval(one_positive, None, 0.95, 200, 0) is None, "undefined on a third of the resamples"


def test_model_does_not_differ_from_itself() -> None:
    actual, predicted = drawn(50)
    twin = make_statistic("spearman", actual, predicted)
    assert aggregate_interval(twin, make_statistic("spearman", actual, predicted), 0.95, 200, 0) == Interval(
        0.0, 0.0, 0.0
    )
    assert not contributions(twin, twin).any()


def test_smaller_error_is_better() -> None:
    actual, predicted = drawn(50)
    near, far = RootMean((predicted - actual) ** 2), RootMean((predicted - actual - 3) ** 2)
    found = aggregate_interval(near, far, 0.95, 200, 0, better=-1)
    assert found is not None and found.low > 0


def coverage(kind: str, trials: int, samples: int) -> float:
    """Return the fraction of intervals that contain the value of a very large sample."""
    true_value = point_estimate(make_statistic(kind, *_pairs(400_000, 99)))
    hits = 0
    for trial in range(trials):
        found = aggregate_interval(make_statistic(kind, *_pairs(samples, trial)), None, 0.95, 500, seed=trial)
        hits += found is not None and found.low <= true_value <= found.high
    return hits / trials


def _pairs(samples: int, seed: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(seed)
    actual = generator.normal(size=samples)
    return actual, actual + generator.normal(size=samples)


def test_interval_covers_the_true_value_roughly_as_promised() -> None:
    assert 0.88 <= coverage("rmse", 100, 150) <= 1.0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rmse", "r2", "spearman", "auc"])
def test_interval_covers_the_true_value_as_promised(kind: str) -> None:
    assert 0.92 <= coverage(kind, 400, 200) <= 0.98
