"""The gate: from measured values and the configured rules to one verdict; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import Interval
from pipeline.evaluate.calibration import Calibration, calibration_rules
from pipeline.evaluate.rules import FEWEST, Comparison, Rule, compared, finite, floors
from pipeline.evaluate.slices import Slice, slice_doubts, slice_rule

Kind: TypeAlias = Literal["pass", "fail", "no-baseline"]


@dataclass(frozen=True)
class Verdict:
    verdict: Kind
    rules: tuple[Rule, ...]
    summary: str
    warnings: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.passed)


@dataclass(frozen=True)
class Judged:
    """All that the rules look at."""

    samples: int
    candidate: Mapping[str, float]
    baseline: Mapping[str, float] | None  # None: there is none
    comparison: Comparison | None  # None without a baseline, or where it cannot be computed
    lower: frozenset[str] = frozenset()  # metrics of which less is better
    undefined: Mapping[str, str] = field(default_factory=dict)  # metric → why it has no value on this test set
    notes: tuple[str, ...] = ()
    slices: tuple[Slice, ...] = ()
    calibration: Calibration | None = None  # of the candidate
    baseline_calibration: Calibration | None = None
    brier_gain: Interval | None = None  # over the baseline


def judge(config: Evaluate, found: Judged) -> Verdict:
    """Apply every rule."""
    rules = [finite(found.candidate), *floors(config, found.candidate, found.lower, found.undefined)]
    if found.baseline is not None:
        rules.append(compared(config, found.comparison, _incomparable(config, found)))
    if (rule := slice_rule(config, found.slices)) is not None:
        rules.append(rule)
    if found.calibration is not None:
        rules += calibration_rules(config, found.calibration, found.brier_gain)
    kind = _kind(rules, compared=found.baseline is not None)
    return Verdict(kind, tuple(rules), _summary(config, found), tuple(_doubts(config, found)))


def rejection(verdict: Verdict, run: str) -> str:
    """Which rules failed, by how much, and what may be done."""
    reasons = "; ".join(rule.detail for rule in verdict.failures)
    return (
        f"candidate rejected: {reasons}. `pipe gate explain {run}` says what would have passed; train a better one, or "
        f"put a reason on record with `pipe gate override {run} --reason WHY`"
    )


def _incomparable(config: Evaluate, found: Judged) -> str:
    """Why there is no interval, where there is none."""
    if why := found.undefined.get(config.metric):
        return why
    values = [side.get(config.metric, math.nan) for side in (found.candidate, found.baseline or {})]
    if all(math.isfinite(value) for value in values):
        return f"{found.samples} samples are too few, or too much alike, to draw it anew from them; take more"
    return "a value is not finite"


def _kind(rules: list[Rule], compared: bool) -> Kind:
    if all(rule.passed for rule in rules):
        return "pass" if compared else "no-baseline"
    return "fail"


def _doubts(config: Evaluate, found: Judged) -> Iterator[str]:
    """What the test set is too small for, or says nothing of, though it does not decide."""
    comparison = found.comparison
    if comparison is not None and comparison.samples >= FEWEST and config.margin < comparison.detectable:
        yield (
            f"the margin {config.margin:g} is finer than what {comparison.samples} test {comparison.unit} can show: "
            f"the smallest difference in {config.metric} they would tell from none is about "
            f"{comparison.detectable:.2g}; take more {comparison.unit}, or a wider margin"
        )
    yield from (f"{name} is undefined: {why}" for name, why in found.undefined.items())
    yield from found.notes
    yield from slice_doubts(config, found.slices)


def _summary(config: Evaluate, found: Judged) -> str:
    """The numbers that decide, on one line."""
    if config.metric in found.undefined:
        return f"{config.metric} is undefined: {found.undefined[config.metric]}"
    text = f"{config.metric} {found.candidate.get(config.metric, math.nan):.4f}"
    if found.baseline is not None:
        text += f" against the baseline's {found.baseline.get(config.metric, math.nan):.4f}"
    if found.comparison is not None:
        difference = found.comparison.difference
        interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
        word = "better by" if config.metric in found.lower else "difference"
        text += f", {word} {difference.estimate:+.4f} ({config.confidence:.0%} interval {interval})"
    return text
