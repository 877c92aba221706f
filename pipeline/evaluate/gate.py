"""The quality gate: apply the configured rules to the measured values and return one verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipeline.contract.registry import FIRST_COMPARISON, ComparisonCount
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.calibration import Calibration, calibration_rules
from pipeline.evaluate.codec_check import CodecCheck
from pipeline.evaluate.compared_data import DataChange, same_data_rule
from pipeline.evaluate.rules import (
    LIMIT_ERRORS,
    Comparison,
    GateRule,
    comparison_rule,
    decide_inconclusive,
    describe_level,
    digits,
    finite_rule,
    requirement_rules,
)
from pipeline.evaluate.slices import MAX_NAMES, Slice, slice_rule, slice_warnings
from pipeline.statistics.intervals import Interval
from pipeline.system.wording import join_names

Kind: TypeAlias = Literal["pass", "fail", "no-baseline"]


@dataclass(frozen=True)
class Verdict:
    verdict: Kind
    rules: tuple[GateRule, ...]
    summary: str
    warnings: tuple[str, ...] = ()
    margin_setting: str = "evaluate.margin"

    @property
    def failures(self) -> tuple[GateRule, ...]:
        return tuple(rule for rule in self.rules if not rule.passed)


@dataclass(frozen=True)
class Measurements:
    """All values that the rules use."""

    samples: int
    candidate: Mapping[str, float]
    baseline: Mapping[str, float] | None  # None if there is none
    comparison: Comparison | None  # None without a baseline, or if it cannot be computed
    count: ComparisonCount = FIRST_COMPARISON
    lower: frozenset[str] = frozenset()  # metrics where lower is better
    undefined: Mapping[str, str] = field(default_factory=dict)  # metric → why it has no value on this test set
    notes: tuple[str, ...] = ()
    data: DataChange | None = None  # against the champion's test set
    codec: CodecCheck | None = None
    doubts: tuple[str, ...] = ()  # reasons to distrust a candidate that passes
    slices: tuple[Slice, ...] = ()
    calibration: Calibration | None = None  # of the candidate
    baseline_calibration: Calibration | None = None
    brier_gain: Interval | None = None  # improvement over the baseline
    near_duplicates: int = 0  # samples left out of `without_copies`
    without_copies: Measurements | None = None  # without copies of other samples; None if no sample is left


def decide(config: Evaluate, measured: Measurements) -> Verdict:
    """Apply every rule."""
    limits, calibration = _limit_rules(config, measured), _calibration_rules(config, measured)
    rules = [finite_rule(measured.candidate), *limits]
    if measured.codec is not None:
        rules.append(measured.codec.rule(config.answers))
    if measured.data is not None:
        rules.append(same_data_rule(config, measured.data))
    if (rule := slice_rule(config, measured.slices)) is not None:
        rules.append(rule)
    rules += calibration
    if (rule := near_duplicates_rule(config, measured, [*limits, *calibration])) is not None:
        rules.append(rule)
    kind = _verdict_kind(rules, has_baseline=measured.baseline is not None)
    unclear = next((rule for rule in rules if rule.inconclusive), None)
    summary = ("" if unclear is None else "inconclusive: ") + _summary(config, measured)
    if measured.codec is not None:
        summary += f"; {measured.codec.summary}"
    if measured.doubts:
        summary += f"; warning: {'; '.join(measured.doubts)}"
    warnings = tuple(_warnings(config, measured))
    return Verdict(kind, tuple(rules), summary, warnings, config.margin_setting)


def _limit_rules(config: Evaluate, measured: Measurements) -> list[GateRule]:
    rules = list(requirement_rules(config, measured.candidate, measured.lower, measured.undefined))
    if measured.baseline is not None:
        rules.append(comparison_rule(config, measured.comparison, _incomparable_reason(config, measured)))
    return rules


def _calibration_rules(config: Evaluate, measured: Measurements) -> list[GateRule]:
    if measured.calibration is None:
        return []
    return list(calibration_rules(config, measured.calibration, measured.brier_gain))


def near_duplicates_rule(config: Evaluate, measured: Measurements, rules: list[GateRule]) -> GateRule | None:
    """Fail if a decisive rule passes only because of copies of other samples; None if nothing depends on them.

    `rules`: the decisive ones, on all samples.
    """
    count, rest = measured.near_duplicates, measured.without_copies
    if not count or not all(rule.passed for rule in rules):
        return None
    how = "the decisive rules, computed again without the test samples that are copies of others"
    change = "remove the copies from the test or the training data"
    copies = f"{count} of {measured.samples} test samples are copies of training samples, or of each other"
    if rest is None:
        text = f"{copies}, so none is left to judge the candidate by"
        return decide_inconclusive(config, GateRule("near_duplicates", False, text, how=how, change=change))
    others = [*_limit_rules(config, rest), *_calibration_rules(config, rest)]
    pairs = [(rule, other) for rule, other in zip(rules, others, strict=True) if not other.passed]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: _is_undecided(pair[1]))
    rule, other = pairs[0]
    text = f"{copies}; {_both_values(rule, other)} without them, so {rule.rule} passes only because of them"
    result = GateRule("near_duplicates", False, text, other.value, rule.limit, how, change)
    return decide_inconclusive(config, result) if _is_undecided(other) else result


def _is_undecided(rule: GateRule) -> bool:
    return rule.inconclusive or rule.value is None


def _both_values(rule: GateRule, other: GateRule) -> str:
    name = rule.rule.removeprefix("require.") if rule.rule.startswith("require.") else "the lower end of the interval"
    values = ["undefined" if value is None else digits(value) for value in (rule.value, other.value)]
    return f"{name} is {values[0]} with and {values[1]}"


def rejection_message(verdict: Verdict, run: str) -> str:
    """Return what failed first and by how much, the other rules that failed, and what to do."""
    first, *others = sorted(verdict.failures, key=lambda rule: (rule.rule != "codec", rule.inconclusive))
    also = f" (also failed: {join_names([rule.rule for rule in others], MAX_NAMES)})" if others else ""
    return f"candidate rejected: {first.detail}{also}; to fix it: {_advice(verdict)}; see `pipe gate explain {run}`"


def _advice(verdict: Verdict) -> str:
    rules = {rule.rule for rule in verdict.failures}
    if "codec" in rules:
        return "correct the codec"
    if rules == {"near_duplicates"}:
        return "remove the copies from the test or the training data"
    if rules == {"test_set"}:
        return "use the champion's test set, or set evaluate.test_set_changed=allow if the change is meant"
    if all(rule.inconclusive for rule in verdict.failures):
        if any(rule.change == LIMIT_ERRORS for rule in verdict.failures):
            return LIMIT_ERRORS
        size = "smaller" if "superior" in rules else "wider"
        return f"use more test samples or a {size} {verdict.margin_setting}"
    return "train a better model"


def _incomparable_reason(config: Evaluate, measured: Measurements) -> str:
    """Return why there is no interval of the difference."""
    if reason := measured.undefined.get(config.metric):
        return reason
    values = [side.get(config.metric, math.nan) for side in (measured.candidate, measured.baseline or {})]
    if all(math.isfinite(value) for value in values):
        return f"too few of {measured.samples} samples differ to estimate how large a difference can be"
    return "a value is not finite"


def _verdict_kind(rules: list[GateRule], has_baseline: bool) -> Kind:
    if all(rule.passed for rule in rules):
        return "pass" if has_baseline else "no-baseline"
    return "fail"


def _warnings(config: Evaluate, measured: Measurements) -> Iterator[str]:
    """Yield what the test set is too small to show, where the difference is near the limit; these do not decide."""
    comparison, margin = measured.comparison, config.applied_margin
    if (
        comparison is not None
        and config.rule == "non-inferior"
        and margin < comparison.detectable < math.inf
        and abs(comparison.difference.estimate + margin) < comparison.detectable
    ):
        yield (
            f"the margin of {digits(margin)} is less than the smallest difference in {config.metric} that "
            f"{comparison.samples} test {comparison.unit} can show, about {digits(comparison.detectable)}; to fix it: "
            f"use more {comparison.unit} or a wider margin"
        )
    yield from (f"{name} is undefined: {reason}" for name, reason in measured.undefined.items())
    yield from measured.notes
    yield from measured.codec.notes if measured.codec is not None else ()
    yield from slice_warnings(measured.slices)


def _summary(config: Evaluate, measured: Measurements) -> str:
    """Return the decisive numbers on one line."""
    if config.metric in measured.undefined:
        return f"{config.metric} is undefined: {measured.undefined[config.metric]}"
    text = f"{config.metric} {digits(measured.candidate.get(config.metric, math.nan))}"
    if measured.baseline is not None:
        text += f" against the {config.opponent}'s {digits(measured.baseline.get(config.metric, math.nan))}"
    if measured.comparison is not None:
        difference = measured.comparison.difference
        estimate, low, high = difference.estimate, difference.low, difference.high
        label = "better by" if config.metric in measured.lower else "difference"
        if config.metric in measured.lower and estimate < 0:
            label, estimate, low, high = "worse by", -estimate, -high, -low
        level = describe_level(config, measured.count)
        interval = f"{digits(low, sign=True)} to {digits(high, sign=True)}"
        text += f", {label} {digits(estimate, sign=True)} ({level} {interval})"
    return text
