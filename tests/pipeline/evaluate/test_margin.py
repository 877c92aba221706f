"""The margin of a metric in units of the data follows how large its values are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.gate import Verdict, decide, rejection_message
from pipeline.evaluate.results import Results
from pipeline.statistics.scores import Columns


def _regressor(unit: float, loss: float, samples: int = 4000) -> Columns:
    """A candidate whose error is larger than the baseline's by a share, in one slice twice as large."""
    generator = np.random.default_rng(0)
    actual, error = generator.normal(size=samples), generator.normal(size=samples)
    worse = np.where(np.arange(samples) < 200, 2.0, 1.0) if loss < 0 else np.full(samples, 1 + loss)
    return {
        "candidate.closeness": np.zeros(samples),
        "candidate.predicted": unit * (actual + worse * error),
        "baseline.closeness": np.zeros(samples),
        "baseline.predicted": unit * (actual + error),
        "actual": unit * actual,
        "slice.region": np.where(np.arange(samples) < 200, "north", "south"),
    }


def _decide(columns: Columns, metric: str, **settings: Any) -> Verdict:
    results = Results(columns, "task", None, None)
    config = Evaluate(rule="non-inferior", metric=metric, **settings).in_units_of(results.metrics[metric].unit_size)
    return decide(config, results.measurements(config))


@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e6])
@pytest.mark.parametrize("metric", ["mae", "rmse"])
def test_an_error_may_grow_by_a_hundredth_in_any_unit(unit: float, metric: str) -> None:
    assert _decide(_regressor(unit, 0.005), metric).verdict == "pass"
    assert [rule.rule for rule in _decide(_regressor(unit, 0.02), metric).failures] == ["non-inferior", "slices"][:1]


@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e6])
def test_a_slice_may_not_lose_a_twentieth_in_any_unit(unit: float) -> None:
    verdict = _decide(_regressor(unit, -1), "mae", margin=0.08 * unit)
    assert [rule.rule for rule in verdict.failures] == ["slices"]


def test_the_margin_of_shares_is_a_hundredth() -> None:
    assert Evaluate().accepted_loss == 0.01
    results = Results(_regressor(1e-5, 0.0), "task", None, None)
    assert results.metrics["r2"].unit_size == results.metrics["spearman"].unit_size == 1.0


@pytest.mark.parametrize(("error", "unclear"), [(1.0, False), (9.0, True)])
def test_a_promise_that_depends_on_few_large_errors_is_inconclusive(error: float, unclear: bool) -> None:
    """The candidate's errors are half as large as the baseline's, except in two of 400 samples."""
    columns = _regressor(1.0, 0.0, 400)
    columns["candidate.predicted"] = (columns["actual"] + columns["baseline.predicted"]) / 2
    columns["candidate.predicted"][:2] = columns["actual"][:2] + error
    verdict = _decide(columns, "mae")
    rule = verdict.rules[1]
    assert (rule.passed, rule.inconclusive) == (not unclear, unclear)
    assert "errors in fewer than 1 of 134 samples may be missing from this test set" in rule.how
    if unclear:
        assert "this depends on how frequent large errors are: 8" in rule.detail
        assert rule.detail.endswith("% of the variance comes from the worst 3 of 400 samples")
        assert "to fix it: use a metric that few samples cannot decide" in rejection_message(verdict, "run-1")
        assert _decide(columns, "mae", inconclusive="pass").verdict == "pass"


def test_one_sample_of_a_small_test_set_may_carry_the_variance() -> None:
    columns = _regressor(1.0, 0.0, 40)
    columns["candidate.predicted"] = columns["actual"] + (columns["baseline.predicted"] - columns["actual"]) * 0.9
    columns["candidate.predicted"][0] = columns["actual"][0] + 2.5
    rule = _decide(columns, "mae", margin=1.0).rules[1]
    assert rule.passed
    assert "% of the variance comes from the worst 1 of 40 samples" in rule.how
    assert int(rule.how.split("% of the variance")[0].split()[-1]) > 50
