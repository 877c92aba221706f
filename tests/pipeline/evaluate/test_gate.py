from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pipeline.contract.registry import ComparisonCount
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.gate import Measurements, Verdict, decide, rejection_message
from pipeline.evaluate.rules import Comparison
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import Interval, difference_interval

CLEAR_WIN = Interval(0.05, 0.02, 0.08)
NON_INFERIOR = Evaluate(rule="non-inferior")


def verdict(
    config: Evaluate | None = None,
    accuracy: float = 0.9,
    difference: Interval | None = CLEAR_WIN,
    samples: int = 400,
    detectable: float = 0.001,
) -> Verdict:
    found = None if difference is None else Comparison(samples, difference, detectable, p_value=0.01)
    return decide(config or NON_INFERIOR, Measurements(samples, {"accuracy": accuracy}, {"accuracy": 0.85}, found))


def test_candidate_above_its_baseline_passes() -> None:
    assert verdict().verdict == "pass"
    assert "accuracy 0.9000 against the baseline's 0.8500" in verdict().summary


def test_missed_requirement_fails_without_a_baseline() -> None:
    assert (
        decide(Evaluate(require={"accuracy": 0.95}), Measurements(400, {"accuracy": 0.9}, None, None)).verdict == "fail"
    )


@pytest.mark.parametrize(
    ("rule", "margin", "low", "expected"),
    [
        *(("non-inferior", 0.01, low, "pass") for low in (-0.0099, 0.0)),
        *(("non-inferior", 0.01, low, "fail") for low in (-0.01, -0.02)),
        ("non-inferior", 0.0, 0.0, "fail"),
        ("superior", 0.01, 0.0101, "pass"),
        *(("superior", 0.01, low, "fail") for low in (0.01, 0.0)),
    ],
)
def test_lower_bound_must_be_strictly_above_the_margin_of_the_rule(
    rule: Any, margin: float, low: float, expected: str
) -> None:
    found = verdict(Evaluate(rule=rule, margin=margin), difference=Interval(0.03, low, 0.06))
    assert (found.verdict, found.rules[-1].rule) == (expected, rule)
    assert margin or "and may be no better; it must be better" in rejection_message(found, "run-1")


def later(single: Interval, wide: Interval, **evaluate: Any) -> Verdict:
    """Return the verdict of the third comparison on a test set, by the second author."""
    count = ComparisonCount(3, authors=2)
    comparison = Comparison(400, wide, 0.001, p_value=0.01, count=count, single=single)
    measured = Measurements(400, {"accuracy": 0.9}, {"accuracy": 0.9}, comparison, count)
    return decide(Evaluate(rule="non-inferior", **evaluate), measured)


def test_later_comparison_states_its_level_and_the_verdict_at_95_percent() -> None:
    found = later(Interval(0.0, -0.009, 0.009), Interval(0.0, -0.012, 0.012))
    assert "(comparison 3 on this test set, 99.17% interval -0.0120 to +0.0120)" in found.summary
    (rule,) = found.failures
    assert "comparison 3 on this test set, 99.17% interval; its lower end" in rule.how
    assert rule.change.endswith("as the first comparison on a test set, at 95%, it would have passed")


def test_a_wider_interval_does_not_make_a_clear_failure_inconclusive() -> None:
    found = later(Interval(-0.02, -0.029, -0.011), Interval(-0.02, -0.04, -0.001), inconclusive="pass")
    assert found.verdict == "fail"
    assert "inconclusive" not in found.summary


@pytest.mark.parametrize("samples", [2, 30, 300])
def test_equal_answers_on_few_samples_are_inconclusive(samples: int) -> None:
    right = Mean(np.ones(samples))
    difference = difference_interval(right, right, 0.95)
    found = verdict(Evaluate(rule="non-inferior", margin=0.01), difference=difference, samples=samples)
    assert found.verdict == "fail"
    assert found.summary.startswith("inconclusive: ")
    message = rejection_message(found, "run-1")
    assert message.startswith("candidate rejected: inconclusive: accuracy is as good as the baseline's and may be 0.")
    allowed = verdict(
        Evaluate(rule="non-inferior", margin=0.01, inconclusive="pass"), difference=difference, samples=samples
    )
    assert allowed.verdict == "pass"
    assert allowed.summary.startswith("inconclusive: ")


def test_equal_answers_on_many_samples_pass() -> None:
    right = Mean(np.ones(400))
    assert (
        verdict(Evaluate(rule="non-inferior", margin=0.01), difference=difference_interval(right, right, 0.95)).verdict
        == "pass"
    )


@pytest.mark.parametrize(("difference", "unclear"), [((-0.05, -0.09, -0.02), False), ((-0.005, -0.09, 0.08), True)])
def test_a_candidate_that_is_surely_worse_is_not_inconclusive(
    difference: tuple[float, float, float], unclear: bool
) -> None:
    found = verdict(Evaluate(rule="non-inferior", margin=0.01, inconclusive="pass"), difference=Interval(*difference))
    assert (found.verdict == "pass", found.rules[-1].inconclusive) == (unclear, unclear)


def test_missing_interval_is_inconclusive() -> None:
    found = verdict(difference=None)
    assert found.rules[-1].detail == (
        "inconclusive: accuracy cannot be compared with the baseline: too few of 400 samples differ to estimate how "
        "large a difference can be"
    )


def test_rejection_names_the_rule_and_the_gap() -> None:
    config = Evaluate(rule="non-inferior", require={"accuracy": 0.95}, margin=0.01)
    failed = verdict(config, accuracy=0.9, difference=Interval(-0.03, -0.05, -0.02))
    assert rejection_message(failed, "run-1") == (
        "candidate rejected: accuracy 0.9000 is 0.05 below the required 0.95 (also failed: non-inferior); to fix it: "
        "train a better model; see `pipe gate explain run-1`"
    )
    assert failed.failures[1].detail == (
        "accuracy is 0.0300 worse than the baseline's and may be 0.0500 worse; 0.0100 worse is allowed"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_fails(value: float) -> None:
    found = verdict(accuracy=value, difference=None)
    assert found.verdict == "fail"
    assert [rule.rule for rule in found.failures] == ["finite", "non-inferior"]
    alone = decide(Evaluate(require={"accuracy": 0.1}), Measurements(400, {"accuracy": math.nan}, None, None))
    assert "require.accuracy" in [rule.rule for rule in alone.failures], "NaN never meets a requirement"


def test_equal_answers_are_not_superior() -> None:
    assert verdict(Evaluate(rule="superior", margin=0.0), difference=Interval(0.0, 0.0, 0.0)).verdict == "fail"


@pytest.mark.parametrize(
    ("difference", "would"),
    [
        (Interval(0.0, -0.02, 0.02), "a margin above 0.0200 would have passed it; so would about 1600 test samples"),
        (Interval(-0.02, -0.04, 0.0), "a margin above 0.0400 would have passed it; more samples would not"),
        (Interval(0.05, 0.02, 0.08), "no margin would have stopped it"),
        (Interval(0.0, -0.005, 0.005), "a margin of 0.0050 or less would have stopped it"),
    ],
)
def test_rules_explain_how_they_were_computed_and_what_would_change_them(difference: Interval, would: str) -> None:
    rule = verdict(Evaluate(rule="non-inferior", margin=0.01), difference=difference).rules[-1]
    assert rule.change.startswith(would)
    assert "on the same 400 samples, 95% interval; its lower end must be above -0.0100" in rule.how
    assert (rule.value, rule.limit) == (difference.low, -0.01)


def test_margin_or_samples_of_the_hint_pass() -> None:
    difference = Interval(0.0, -0.02, 0.02)
    assert verdict(Evaluate(rule="non-inferior", margin=0.0201), difference=difference).verdict == "pass"
    assert (
        verdict(
            Evaluate(rule="non-inferior", margin=0.01), difference=Interval(0.0, -0.01 + 1e-9, 0.01), samples=1600
        ).verdict
        == "pass"
    )


def test_margin_below_what_the_samples_show_is_a_warning_where_it_matters() -> None:
    close = Interval(0.01, -0.02, 0.04)
    (warning,) = verdict(NON_INFERIOR, difference=close, samples=300, detectable=0.024).warnings
    assert "the smallest difference in accuracy that 300 test samples can show, about 0.024" in warning
    wide = Evaluate(rule="non-inferior", margin=0.03)
    assert verdict(wide, difference=close, samples=300, detectable=0.024).warnings == ()
    assert verdict(NON_INFERIOR, samples=300, detectable=0.024).warnings == (), "the difference is clear"
    assert decide(Evaluate(), Measurements(400, {"accuracy": 0.9}, None, None)).warnings == ()


def test_candidate_worse_by_the_margin_passes_at_the_nominal_rate() -> None:
    generator = np.random.default_rng(0)
    config, passed = Evaluate(rule="non-inferior", margin=0.05), 0
    for _ in range(1000):
        values = generator.choice([-1.0, 0.0, 1.0], size=400, p=[0.15, 0.75, 0.1])
        found = difference_interval(Mean(values), Mean(np.zeros(400)), config.confidence)
        passed += verdict(config, difference=found).verdict == "pass"
    assert passed / 1000 <= 0.025 + 0.015, "the level of one side, and what 1,000 trials may stray"
    assert passed / 1000 >= 0.025 - 0.015


def test_small_units_are_not_printed_as_zero() -> None:
    rules = decide(
        Evaluate(rule="non-inferior", require={"mae": 4e-6}, margin=0.0),
        Measurements(400, {"accuracy": 0.9, "mae": 3.2e-6}, None, None, lower=frozenset({"mae"})),
    ).rules
    assert "mae 3.2e-06 is within the 4e-06 allowed" in [rule.detail for rule in rules]
    assert (
        "-1.5e-06"
        in verdict(Evaluate(rule="non-inferior", margin=0.0), difference=Interval(1e-6, -1.5e-6, 3e-6)).summary
    )


def test_default_rule_beats_the_baseline_and_matches_the_champion() -> None:
    equal = Interval(0.0, -0.005, 0.005)
    assert verdict(Evaluate(), difference=equal).verdict == "fail"
    assert verdict(Evaluate().against_champion(), difference=equal).verdict == "pass"
    assert verdict(Evaluate().against_champion(), difference=Interval(-0.02, -0.025, -0.015)).verdict == "fail"


@pytest.mark.parametrize(
    ("settings", "rule", "margin"),
    [
        ({"margin": 0.2}, "non-inferior", 0.01),
        ({"rule": "non-inferior", "margin": 0.2}, "non-inferior", 0.2),
        ({"champion_margin": 0.03}, "non-inferior", 0.03),
        ({"champion_rule": "superior"}, "superior", 0.0),
        ({"champion_rule": "superior", "margin": 0.2}, "superior", 0.2),
    ],
)
def test_margin_applies_to_the_champion_only_with_its_rule(settings: dict[str, Any], rule: str, margin: float) -> None:
    applied = Evaluate(**settings).against_champion()
    assert (applied.rule, applied.applied_margin) == (rule, margin)


def test_the_advice_names_the_margin_that_applies() -> None:
    unclear = Interval(0.0, -0.02, 0.02)
    assert "a smaller evaluate.margin" in rejection_message(verdict(Evaluate(), difference=unclear), "run-1")
    applied = Evaluate().against_champion()
    assert "a wider evaluate.champion_margin" in rejection_message(verdict(applied, difference=unclear), "run-1")
