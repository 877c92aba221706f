from __future__ import annotations

import math

import pytest

from evaluate.gate import Verdict, judge, rejection
from evaluate.statistics import Interval
from pipeline.spec.sections import Evaluate

CLEAR_WIN = Interval(0.05, 0.02, 0.08)


def verdict(config: Evaluate | None = None, accuracy: float = 0.9, difference: Interval | None = CLEAR_WIN) -> Verdict:
    return judge(config or Evaluate(), {"accuracy": accuracy}, {"accuracy": 0.85}, difference)


def test_a_candidate_above_its_baseline_passes() -> None:
    assert verdict().verdict == "pass"
    assert "accuracy 0.9000 against the baseline's 0.8500" in verdict().summary


def test_without_a_baseline_the_verdict_says_so() -> None:
    assert judge(Evaluate(), {"accuracy": 0.9}, None, None).verdict == "no-baseline"


def test_without_a_baseline_a_missed_floor_still_fails() -> None:
    assert judge(Evaluate(require={"accuracy": 0.95}), {"accuracy": 0.9}, None, None).verdict == "fail"


@pytest.mark.parametrize(("low", "expected"), [(-0.0099, "pass"), (-0.01, "fail"), (-0.02, "fail"), (0.0, "pass")])
def test_the_lower_bound_must_lie_strictly_above_minus_the_margin(low: float, expected: str) -> None:
    assert verdict(Evaluate(margin=0.01), difference=Interval(0.0, low, 0.02)).verdict == expected


def test_a_twin_of_the_baseline_is_not_inferior_at_margin_zero() -> None:
    assert verdict(Evaluate(margin=0.0), difference=Interval(0.0, 0.0, 0.0)).verdict == "pass"


def test_a_bound_that_only_touches_zero_is_not_enough_at_margin_zero() -> None:
    found = verdict(Evaluate(margin=0.0), difference=Interval(0.01, 0.0, 0.02))
    assert found.verdict == "fail"
    assert "no better than" in rejection(found)


def test_a_rejection_names_the_rule_and_by_how_much() -> None:
    config = Evaluate(require={"accuracy": 0.95}, margin=0.01)
    text = rejection(verdict(config, accuracy=0.9, difference=Interval(-0.03, -0.05, 0.0)))
    assert "accuracy 0.9000 is 0.05 below the required 0.95" in text
    assert "misses -0.0100 by 0.04" in text
    assert "evaluate.force_reason" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_fails(value: float) -> None:
    found = verdict(accuracy=value, difference=None)
    assert found.verdict == "fail"
    assert [rule.rule for rule in found.failures] == ["finite", "non-inferior"]


def test_a_nan_never_reaches_a_floor() -> None:
    found = judge(Evaluate(require={"accuracy": 0.1}), {"accuracy": math.nan}, None, None)
    assert "require.accuracy" in [rule.rule for rule in found.failures]


def test_a_required_metric_that_the_task_lacks_fails_and_lists_those_it_has() -> None:
    found = verdict(Evaluate(require={"f1": 0.5}))
    assert found.verdict == "fail"
    assert "no such metric (it has accuracy)" in found.failures[0].detail


def test_a_forced_candidate_goes_on_with_its_failures_on_record() -> None:
    found = verdict(Evaluate(require={"accuracy": 0.99}, force_reason="demo on Monday"))
    assert found.verdict == "forced"
    assert [rule.rule for rule in found.failures] == ["require.accuracy"]


def test_a_reason_to_force_is_ignored_where_nothing_fails() -> None:
    assert verdict(Evaluate(force_reason="just in case")).verdict == "pass"
