"""The gate: from measured values and the configured rules to one verdict; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from evaluate.statistics import Interval
from pipeline.spec.sections import Evaluate

Kind: TypeAlias = Literal["pass", "fail", "no-baseline", "forced"]


@dataclass(frozen=True)
class Rule:
    rule: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    verdict: Kind
    rules: tuple[Rule, ...]
    summary: str

    @property
    def failures(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.passed)


def judge(
    config: Evaluate,
    candidate: Mapping[str, float],
    baseline: Mapping[str, float] | None,
    difference: Interval | None,
) -> Verdict:
    """Apply every rule; `difference` is None without a baseline, or when it cannot be computed."""
    rules = [*_finite(candidate), *_floors(config, candidate)]
    if baseline is not None:
        rules.append(_not_inferior(config, difference))
    kind = _kind(rules, forced=bool(config.force_reason), compared=baseline is not None)
    return Verdict(kind, tuple(rules), _summary(config, candidate, baseline, difference))


def rejection(verdict: Verdict) -> str:
    """Which rules failed, by how much, and what may be done."""
    reasons = "; ".join(rule.detail for rule in verdict.failures)
    return f"candidate rejected: {reasons}. Train a better one, or put evaluate.force_reason on record"


def _kind(rules: list[Rule], forced: bool, compared: bool) -> Kind:
    if all(rule.passed for rule in rules):
        return "pass" if compared else "no-baseline"
    return "forced" if forced else "fail"


def _finite(candidate: Mapping[str, float]) -> Iterator[Rule]:
    bad = sorted(name for name, value in candidate.items() if not math.isfinite(value))
    if bad:
        yield Rule("finite", False, f"{', '.join(bad)} of the candidate is not a finite number")
    else:
        yield Rule("finite", True, f"all finite: {', '.join(sorted(candidate))}")


def _floors(config: Evaluate, candidate: Mapping[str, float]) -> Iterator[Rule]:
    for name, floor in sorted(config.require.items()):
        value = candidate.get(name)
        if value is None:
            known = ", ".join(sorted(candidate))
            text = f"{name} is required to be {floor:g} at least, but the task has no such metric (it has {known})"
            yield Rule(f"require.{name}", False, text)
        elif not math.isfinite(value):
            yield Rule(f"require.{name}", False, f"{name} is not finite, required is {floor:g}")
        elif value < floor:
            text = f"{name} {value:.4f} is {floor - value:.4g} below the required {floor:g}"
            yield Rule(f"require.{name}", False, text)
        else:
            yield Rule(f"require.{name}", True, f"{name} {value:.4f} reaches the required {floor:g}")


def _not_inferior(config: Evaluate, difference: Interval | None) -> Rule:
    """The interval's lower bound must lie above -margin, strictly.

    Answers that equal the baseline's on every sample are not inferior even at margin 0, where no bound
    could ever lie above: the retrained twin of a champion must not be turned away.
    """
    name = "non-inferior"
    if difference is None:
        return Rule(name, False, f"{config.metric} cannot be compared with the baseline: a value is not finite")
    if difference == Interval(0.0, 0.0, 0.0):
        return Rule(name, True, f"{config.metric} equals the baseline's on every sample")
    bound, low = -config.margin, difference.low
    if low > bound:
        return Rule(name, True, f"{config.metric} difference is at least {low:+.4f}, above {_signed(bound)}")
    text = (
        f"{config.metric} may be {_fall(low)} the baseline's: the lower bound {low:+.4f} of the difference "
        f"misses {_signed(bound)} by {bound - low:.4g}"
    )
    return Rule(name, False, text)


def _summary(
    config: Evaluate, candidate: Mapping[str, float], baseline: Mapping[str, float] | None, difference: Interval | None
) -> str:
    """The numbers that decide, on one line."""
    value = candidate.get(config.metric, math.nan)
    text = f"{config.metric} {value:.4f}"
    if baseline is not None:
        text += f" against the baseline's {baseline.get(config.metric, math.nan):.4f}"
    if difference is not None:
        interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
        text += f", difference {difference.estimate:+.4f} ({config.confidence:.0%} interval {interval})"
    return text


def _fall(low: float) -> str:
    return f"{-low:.4f} below" if low < 0 else "no better than"


def _signed(bound: float) -> str:
    return f"{bound:+.4f}" if bound else "0"
