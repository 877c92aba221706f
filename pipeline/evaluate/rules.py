"""One rule of the gate as it was applied: what was measured, how, against what, and what would have changed it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import Interval

_NONE: Mapping[str, str] = MappingProxyType({})

FEWEST = 2  # samples, below which nothing is known of how they vary


@dataclass(frozen=True)
class Rule:
    rule: str
    passed: bool
    detail: str
    value: float | None = None  # what decided
    limit: float | None = None  # what it was held against
    how: str = ""  # computed
    change: str = ""  # what would have turned it the other way


@dataclass(frozen=True)
class Comparison:
    """Of candidate and baseline, on the same samples."""

    samples: int
    difference: Interval
    detectable: float  # the smallest true difference that four of five test sets like this one would show
    p_value: float  # of so large a difference where it is a toss-up which model gave which answer
    unit: str = "samples"


def finite(candidate: Mapping[str, float]) -> Rule:
    how = "a metric's mean over all samples is a number only where each of its values is"
    bad = sorted(name for name, value in candidate.items() if not math.isfinite(value))
    if bad:
        change = "metrics() must give a number for every sample; look for a division by zero or a logarithm of it"
        text = f"{', '.join(bad)} of the candidate is not a finite number"
        return Rule("finite", False, text, how=how, change=change)
    return Rule("finite", True, f"all finite: {', '.join(sorted(candidate))}", how=how)


def floors(
    config: Evaluate, candidate: Mapping[str, float], lower: Collection[str] = (), undefined: Mapping[str, str] = _NONE
) -> Iterator[Rule]:
    """Of an error, where less is better, the number is a ceiling."""
    for name, limit in sorted(config.require.items()):
        if name in undefined:
            text = f"{name} is undefined, required is {limit:g}: {undefined[name]}"
            yield Rule(f"require.{name}", False, text, None, limit, change="another test set, or no such requirement")
        elif name in lower:
            yield _ceiling(name, limit, candidate[name])
        else:
            yield _floor(name, limit, candidate)


def _ceiling(name: str, limit: float, value: float) -> Rule:
    rule, how = f"require.{name}", f"{name} of the candidate over the whole test set, at most {limit:g}"
    if not math.isfinite(value):
        return Rule(rule, False, f"{name} is not finite, allowed is {limit:g}", None, limit, how)
    if value > limit:
        text = f"{name} {value:.4f} is {value - limit:.4g} above the {limit:g} allowed"
        return Rule(rule, False, text, value, limit, how, f"a limit of {value:.4f} or more would have passed it")
    text = f"{name} {value:.4f} is within the {limit:g} allowed"
    return Rule(rule, True, text, value, limit, how, f"a limit below {value:.4f} would have stopped it")


def _floor(name: str, floor: float, candidate: Mapping[str, float]) -> Rule:
    rule, value = f"require.{name}", candidate.get(name)
    how = f"{name} of the candidate over the whole test set, at least {floor:g}"
    if value is None:
        known = ", ".join(sorted(candidate))
        text = f"{name} is required to be {floor:g} at least, but the task has no such metric (it has {known})"
        return Rule(rule, False, text, None, floor, how, "name a metric that the task has")
    if not math.isfinite(value):
        return Rule(rule, False, f"{name} is not finite, required is {floor:g}", None, floor, how)
    if value < floor:
        text = f"{name} {value:.4f} is {floor - value:.4g} below the required {floor:g}"
        change = f"a floor of {value:.4f} or less would have passed it"
        return Rule(rule, False, text, value, floor, how, change)
    text = f"{name} {value:.4f} reaches the required {floor:g}"
    return Rule(rule, True, text, value, floor, how, f"a floor above {value:.4f} would have stopped it")


def compared(config: Evaluate, comparison: Comparison | None, why: str) -> Rule:
    """The interval's lower bound must lie above -margin (or, to be superior, above the margin), strictly.

    Answers that equal the baseline's on every sample are not inferior even at margin 0, where no bound
    could ever lie above: the retrained twin of a champion must not be turned away. `why` there is no comparison.
    """
    name, bound = config.rule, _bound(config)
    if comparison is None:
        text = f"{config.metric} cannot be compared with the baseline: {why}"
        return Rule(name, False, text, limit=bound)
    if comparison.samples < FEWEST:
        single = "query" if comparison.unit == "queries" else "sample"
        text = f"{config.metric} cannot be compared with the baseline on a single {single}"
        return Rule(name, False, text, limit=bound, change=f"a test set of more {comparison.unit}")
    difference, how = comparison.difference, _how(config, comparison, bound)
    low = difference.low
    if name == "non-inferior" and difference == Interval(0.0, 0.0, 0.0):
        return Rule(name, True, f"{config.metric} equals the baseline's on every sample", 0.0, bound, how)
    if comparison.samples < (needed := fewest(config.confidence)):
        text = (
            f"{config.metric} cannot be compared with the baseline on {comparison.samples} {comparison.unit}: in one "
            f"of {2 ** (comparison.samples - 1)} such test sets all lie on one side by chance; take {needed} at least"
        )
        return Rule(name, False, text, limit=bound, change=f"a test set of {needed} {comparison.unit} or more")
    if low > bound:
        text = f"{config.metric} difference is at least {low:+.4f}, above {_signed(bound)}"
        return Rule(name, True, text, low, bound, how, _would_fail(config, low))
    text = (
        f"{config.metric} may be {_fall(low)} the baseline's: the lower bound {low:+.4f} of the difference "
        f"misses {_signed(bound)} by {bound - low:.4g}"
    )
    return Rule(name, False, text, low, bound, how, _would_pass(config, comparison, bound))


def fewest(confidence: float) -> int:
    """Samples, below which all of them lie on one side by chance more often than an interval may miss.

    A bootstrap of fewer knows nothing of that: of two samples its interval misses the truth every other time.
    """
    return math.ceil(math.log2(2 / (1 - confidence)) - 1e-9)


def samples_needed(samples: int, reach: float, distance: float) -> int | None:
    """So many that an interval of this reach would be no longer than the distance; None where none suffice."""
    if distance <= 0 or not math.isfinite(reach):
        return None
    return math.ceil(samples * (reach / distance) ** 2)


def _bound(config: Evaluate) -> float:
    return config.margin if config.rule == "superior" else -config.margin


def _how(config: Evaluate, comparison: Comparison, bound: float) -> str:
    return (
        f"difference in {config.metric} to the baseline on the same {comparison.samples} {comparison.unit}, "
        f"{config.confidence:.0%} BCa bootstrap interval of {config.resamples} resamples with seed {config.seed}; its "
        f"lower bound must lie above {_signed(bound)}"
    )


def _would_fail(config: Evaluate, low: float) -> str:
    if config.rule == "superior":
        return f"a margin of {low:.4f} or more would have stopped it"
    if low > 0:
        return "no margin would have stopped it: the whole interval lies above the baseline"
    return f"a margin of {-low:.4f} or less would have stopped it"


def _would_pass(config: Evaluate, comparison: Comparison, bound: float) -> str:
    difference = comparison.difference
    allowed = difference.low if config.rule == "superior" else -difference.low
    margins = (
        f"a margin {'below' if config.rule == 'superior' else 'above'} {allowed:.4f} would have passed it"
        if allowed >= 0
        else "no margin would have passed it as `superior`"
    )
    distance, reach = difference.estimate - bound, difference.estimate - difference.low
    needed = samples_needed(comparison.samples, reach, distance)
    if needed is None:
        more = f"more samples would not: the difference itself, {difference.estimate:+.4f}, lies below {_signed(bound)}"
    else:
        more = f"so would about {needed} test samples that show the same difference and spread"
    return f"{margins}; {more}"


def _fall(low: float) -> str:
    return f"{-low:.4f} below" if low < 0 else "no better than" if low == 0 else f"only {low:.4f} above"


def _signed(bound: float) -> str:
    return f"{bound:+.4f}" if bound else "0"
