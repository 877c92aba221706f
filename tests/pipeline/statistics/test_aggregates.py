from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error

from pipeline.statistics.aggregates import (
    Auc,
    Average,
    CalibrationError,
    ExplainedVariance,
    Floats,
    Mean,
    RootMean,
    Spearman,
    Statistic,
    contributions,
)
from pipeline.statistics.significance import calibration_curve, expected_calibration_error

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
        assert make_statistic(kind, actual, predicted).estimate == pytest.approx(value, abs=1e-12), kind


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_repeated_samples(kind: str) -> None:
    actual, predicted = drawn(60)
    counts = np.random.default_rng(0).integers(0, 4, size=60)
    weighted = make_statistic(kind, actual, predicted).values(counts[None].astype(np.float64))[0]
    assert weighted == pytest.approx(
        make_statistic(kind, np.repeat(actual, counts), np.repeat(predicted, counts)).estimate
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
        slope = (statistic.values(weights)[0] - statistic.estimate) / step
        assert slope == pytest.approx(influence[i], abs=1e-3, rel=1e-3)


def test_model_does_not_differ_from_itself() -> None:
    actual, predicted = drawn(50)
    twin = make_statistic("spearman", actual, predicted)
    assert twin.informative(make_statistic("spearman", actual, predicted)) == 0
    assert not contributions(twin, twin).any()


def test_samples_that_distinguish_two_models_are_counted() -> None:
    actual = np.array([0.0, 0, 0, 1, 1, 1])
    first, second = np.array([0.1, 0.2, 0.3, 0.7, 0.8, 0.9]), np.array([0.1, 0.2, 0.75, 0.7, 0.8, 0.9])
    assert Mean(first).informative(Mean(second)) == 1
    assert RootMean(first).informative(None) == 6
    assert Mean(np.array([1.0, 1, 1, 0.5])).informative(None) == 1
    assert Auc(first, actual > 0).informative(Auc(second, actual > 0)) == 1, "of the kind with fewer"
    assert Auc(first, actual > 0).informative(Auc(first**3, actual > 0)) == 0, "the same order"
