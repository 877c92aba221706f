"""Metrics of forecasts: a number, and perhaps quantiles, for each horizon of a sample."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_pinball_loss, r2_score, root_mean_squared_error
from torch import Tensor

from pipeline.contract.task import Task
from pipeline.statistics.metrics import by_horizon, compute_metrics
from pipeline.statistics.scores import Columns, actual_columns, score_batch
from pipeline.system.errors import DataError

LEVELS = (0.1, 0.5, 0.9)
PLACES = (("mae", 0), ("rmse", 2), ("r2", 3), ("pinball", 1))  # of horizons


def drawn(samples: int = 60, horizons: int = 4, seed: int = 1) -> Columns:
    """Return forecasts of series, each with errors of one direction in all of its horizons, which grow with these."""
    generator = np.random.default_rng(seed)
    actual = generator.normal(size=(samples, horizons)) + np.arange(horizons) * 10
    errors = generator.normal(size=(2, samples, 1)) * np.array([0.5, 1.0])[:, None, None] * np.arange(1, horizons + 1)
    columns = {"actual": actual, "levels": np.tile(LEVELS, (samples, 1))}
    for owner, error in zip(("candidate", "baseline"), errors, strict=True):
        columns[f"{owner}.predicted"] = actual + error
        columns[f"{owner}.quantiles"] = (actual + error)[:, :, None] + np.array([-1.0, 0.0, 1.0])
    return columns


def test_metrics_of_all_and_of_single_horizons_agree_with_scikit_learn() -> None:
    columns = drawn()
    named = ("mae_1", "rmse_3", "r2_4", "pinball_2")
    metrics = compute_metrics(columns, None, True, named=named)
    assert list(metrics) == ["mae", "rmse", "r2", "pinball", "coverage_error", "mae_1", "pinball_2", "r2_4", "rmse_3"]
    assert [name for name, metric in metrics.items() if not metric.lower] == ["r2", "r2_4"]
    for owner in ("candidate", "baseline"):
        actual, predicted, quantiles = columns["actual"], columns[f"{owner}.predicted"], columns[f"{owner}.quantiles"]
        values = {name: metric.value(owner) for name, metric in metrics.items()}
        deviations = (actual - actual.mean(axis=0)) ** 2
        expected = {
            "mae": mean_absolute_error(actual, predicted),
            "rmse": math.sqrt(((actual - predicted) ** 2).mean()),
            "r2": 1 - ((actual - predicted) ** 2).sum() / deviations.sum(),
            "pinball": np.mean([mean_pinball_loss(actual, quantiles[..., i], alpha=q) for i, q in enumerate(LEVELS)]),
            "coverage_error": np.mean([abs((actual <= quantiles[..., i]).mean() - q) for i, q in enumerate(LEVELS)]),
            "mae_1": mean_absolute_error(actual[:, 0], predicted[:, 0]),
            "pinball_2": np.mean(
                [mean_pinball_loss(actual[:, 1], quantiles[:, 1, i], alpha=q) for i, q in enumerate(LEVELS)]
            ),
            "r2_4": r2_score(actual[:, 3], predicted[:, 3]),
            "rmse_3": root_mean_squared_error(actual[:, 2], predicted[:, 2]),
        }
        assert values == pytest.approx(expected, abs=1e-12)
        body = by_horizon(columns, compared=True)
        assert [body["horizons"][name][owner][place] for name, place in PLACES] == pytest.approx(
            [expected[f"{name}_{place + 1}"] for name, place in PLACES]
        )
        shares = [(actual <= quantiles[..., i]).mean() for i in range(3)]
        assert body["coverage"] == {**body["coverage"], "level": [*LEVELS], owner: pytest.approx(shares)}


@pytest.mark.parametrize("name", ["mae", "rmse", "r2", "pinball", "coverage_error", "rmse_4"])
def test_the_unit_of_an_interval_is_a_sample(name: str) -> None:
    """The interval stays as it is where each horizon is repeated ten times."""
    columns = drawn(samples=400)
    metric = compute_metrics(columns, None, True, named=[name])[name]
    repeated = {key: values if key == "levels" else values.repeat(10, axis=1) for key, values in columns.items()}
    again = compute_metrics(repeated, None, True, named=["rmse_40"])["rmse_40" if name == "rmse_4" else name]
    for interval, other in (
        (metric.difference(0.95), again.difference(0.95)),
        (metric.interval("candidate", 0.95), again.interval("candidate", 0.95)),
    ):
        assert interval is not None
        assert other is not None
        assert (other.low, other.estimate, other.high) == pytest.approx(
            (interval.low, interval.estimate, interval.high)
        )
        assert interval.low < interval.estimate < interval.high


@pytest.mark.parametrize("name", ["mae", "rmse", "r2", "pinball", "coverage_error"])
def test_intervals_of_the_difference_hold_the_true_value_about_as_often_as_they_say(name: str) -> None:
    truth = compute_metrics(drawn(200_000), None, True)[name]
    difference = (truth.value("candidate") - truth.value("baseline")) * truth.better
    hits = 0
    for seed in range(200):
        interval = compute_metrics(drawn(150, seed=seed), None, True)[name].difference(0.95)
        assert interval is not None
        hits += interval.low <= difference <= interval.high
    assert 180 <= hits <= 200


def test_a_metric_of_the_task_replaces_one_of_the_same_name() -> None:
    columns = drawn() | {"candidate.mae_1": np.full(60, 7.0), "baseline.mae_1": np.full(60, 8.0)}
    metrics = compute_metrics(columns, None, True, lower=["mae_1"], named=["mae_1"])
    assert (metrics["mae_1"].value("candidate"), metrics["mae_1"].lower) == (7, True)


@pytest.mark.parametrize("name", ["mae_0", "mae_5", "mae_", "mae_x", "spearman_1", "coverage_error_1", "loss_1"])
def test_names_of_no_metric_are_left_out(name: str) -> None:
    assert name not in compute_metrics(drawn(), None, True, named=[name])


def test_a_horizon_whose_true_values_are_equal_has_no_r2() -> None:
    columns = drawn()
    columns["actual"][:, 1] = 3.0
    metrics = compute_metrics(columns, None, True, named=["r2_2"])
    assert metrics["r2_2"].why == "all true values are equal"
    assert math.isfinite(metrics["r2"].value("candidate"))


@pytest.mark.parametrize("column", ["candidate.predicted", "candidate.quantiles"])
def test_a_forecast_that_is_not_finite_has_no_finite_metric(column: str) -> None:
    columns = drawn()
    columns[column][5, 2] = math.nan
    metrics = compute_metrics(columns, None, True, named=["mae_1", "mae_3"])
    assert [name for name, metric in metrics.items() if math.isfinite(metric.value("candidate"))] == ["mae_1"]
    assert all(math.isfinite(metric.value("baseline")) for metric in metrics.values())


def test_many_horizons_need_little_more_memory_than_the_forecasts() -> None:
    columns = {name: np.zeros((4000, 720), np.float32) for name in ("actual", "candidate.predicted")}
    columns["actual"] += np.arange(4000, dtype=np.float32)[:, None]
    tracemalloc.start()
    metrics = compute_metrics(columns, None, False, named=["mae", "rmse_720"])
    for metric in metrics.values():
        assert metric.interval("candidate", 0.95)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * columns["actual"].nbytes


def forecaster(predicted: Any, actual: Any, **more: Any) -> Task:
    parts = {"predicted": lambda outputs: predicted, "actual": lambda batch: actual, **more}
    return cast("Task", SimpleNamespace(metrics=lambda outputs, batch: {"m": torch.zeros(3)}, **parts))


def scored(task: Task) -> Columns:
    batch = {"x": torch.zeros(3, 2)}
    columns = {
        f"candidate.{name}": values for name, values in score_batch(task, lambda _: torch.zeros(3), batch).items()
    }
    columns |= actual_columns(task, batch, 3)
    compute_metrics(columns, None, False)
    return columns


def test_forecasts_keep_their_bits_and_levels_are_a_column() -> None:
    quantiles = {"quantiles": LEVELS, "predicted_quantiles": lambda outputs: torch.zeros(3, 2, 3)}
    columns = scored(forecaster(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bfloat16), **quantiles))
    assert columns["candidate.predicted"].dtype == columns["actual"].dtype == np.float32
    assert columns["candidate.quantiles"].shape == (3, 2, 3)
    assert columns["levels"].tolist() == [list(LEVELS)] * 3
    assert scored(forecaster(torch.zeros(3), torch.ones(3)))["actual"].dtype == np.float64


@pytest.mark.parametrize(
    ("predicted", "actual", "more", "message"),
    [
        (
            torch.zeros(3, 2, 1),
            torch.zeros(3, 2),
            {},
            r"predicted\(\): must be one number per sample.*or one for each h",
        ),
        (torch.zeros(2, 3), torch.zeros(3, 2), {}, r"predicted\(\).*\(3, horizons\), not shape \(2, 3\)"),
        (torch.zeros(3, 0), torch.zeros(3, 2), {}, r"predicted\(\).*not shape \(3, 0\)"),
        (
            torch.zeros(3, 2),
            torch.zeros(3),
            {},
            r"predicted\(\) and actual\(\) have the shapes \(samples, 2\) and \(samples,\); to fix",
        ),
        (
            torch.zeros(3),
            torch.zeros(3, 2),
            {},
            r"predicted\(\) and actual\(\) have the shapes \(samples,\) and \(samples, 2\); to",
        ),
        (
            torch.zeros(3, 4),
            torch.zeros(3, 2),
            {},
            r"predicted\(\) and actual\(\) have the shapes \(samples, 4\) and \(samples, 2\)",
        ),
        (torch.zeros(3, 2), torch.zeros(3, 2), {"queries": lambda batch: torch.zeros(3)}, r"shape \(3,\), not shape"),
        (torch.zeros(3, 2), torch.full((3, 2), math.nan), {}, "label of the test data is not a finite number"),
        (
            torch.zeros(3, 2),
            torch.zeros(3, 2),
            {"quantiles": LEVELS, "predicted_quantiles": lambda outputs: torch.zeros(3, 3, 2)},
            r"predicted_quantiles\(\): must have shape \(3, 2, 3\), not shape \(3, 3, 2\)",
        ),
        (
            torch.zeros(3),
            torch.zeros(3),
            {"quantiles": LEVELS, "predicted_quantiles": lambda outputs: torch.zeros(3, 1, 3)},
            r"predicted_quantiles\(\): needs predicted\(\) and actual\(\) of shape \(samples, horizons\)",
        ),
    ],
)
def test_other_shapes_are_refused_in_one_sentence(
    predicted: Tensor, actual: Tensor, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        scored(forecaster(predicted, actual, **more))
