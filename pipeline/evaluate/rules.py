"""Rules of the gate: each with the measured value, its limit, how it was computed, and what would have changed it.

The rules on slices and on calibration are in `slices.py` and `calibration.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.contract.registry import FIRST_COMPARISON, ComparisonCount
from pipeline.contract.settings.stages import Evaluate
from pipeline.statistics.intervals import Interval
from pipeline.statistics.significance import confidence_text, repeated_confidence

_SMALL = 1e-3
_DOMINATED = 0.5  # share of the variance with which a few samples decide the interval


@dataclass(frozen=True)
class GateRule:
    rule: str
    passed: bool
    detail: str
    value: float | None = None  # the decisive value
    limit: float | None = None  # what the value was compared with
    how: str = ""  # how the value was computed
    change: str = ""  # what would have reversed the outcome
    inconclusive: bool = False  # the test set is too small to decide it


@dataclass(frozen=True)
class Comparison:
    """The difference of candidate and baseline on the same samples."""

    samples: int
    difference: Interval
    detectable: float  # smallest true difference that 80% of such test sets would show
    p_value: float  # of the sign-flip permutation test
    unit: str = "samples"
    count: ComparisonCount = FIRST_COMPARISON
    single: Interval | None = None  # what the interval would be if it were not widened; None if it is not
    worst: tuple[int, float] | None = None  # number and share of the variance of the largest losses, without limits

    @property
    def assumption(self) -> str:
        """Return what the interval leaves out; empty for a metric with limits."""
        rare = f"1 of {math.ceil(self.samples / 3)} {self.unit}"
        text = f"errors in fewer than {rare} may be missing from this test set, and the interval does not count them"
        return "" if self.worst is None else text


def digits(value: float, *, sign: bool = False) -> str:
    """Format with four decimals, a small number with four significant digits."""
    is_small = 0 < abs(value) < _SMALL
    return format(value, f"{'+' if sign else ''}{'.4g' if is_small else '.4f'}")


def position(difference: float, opponent: str = "") -> str:
    """Return a difference in words, to the opponent's value if it is named; positive is better, of errors too."""
    if not difference:
        return f"as good as the {opponent}'s" if opponent else "no better"
    than = f" than the {opponent}'s" if opponent else ""
    return f"{digits(abs(difference))} {'worse' if difference < 0 else 'better'}{than}"


def finite_rule(candidate: Mapping[str, float]) -> GateRule:
    how = "the mean of a metric is finite only if its value is finite for every sample"
    bad = sorted(name for name, value in candidate.items() if not math.isfinite(value))
    if bad:
        change = "metrics() must return a finite number for every sample; look for divisions or logarithms of zero"
        text = f"{', '.join(bad)} of the candidate is not a finite number"
        return GateRule("finite", False, text, how=how, change=change)
    return GateRule("finite", True, f"all finite: {', '.join(sorted(candidate))}", how=how)


def requirement_rules(
    config: Evaluate, candidate: Mapping[str, float], lower: Collection[str], undefined: Mapping[str, str]
) -> Iterator[GateRule]:
    """Yield a rule per required metric; the limit is an upper one where lower is better."""
    for name, limit in sorted(config.metric_limits.items()):
        if name in undefined:
            text = f"{name} is undefined, required is {limit:g}: {undefined[name]}"
            yield GateRule(
                f"require.{name}", False, text, None, limit, change="another test set, or no such requirement"
            )
        elif name in lower:
            yield _upper_limit_rule(name, limit, candidate[name])
        else:
            yield _lower_limit_rule(name, limit, candidate[name])


def _upper_limit_rule(name: str, limit: float, value: float) -> GateRule:
    rule, how = f"require.{name}", f"{name} of the candidate over the whole test set, at most {limit:g}"
    if not math.isfinite(value):
        return GateRule(rule, False, f"{name} is not finite, allowed is {limit:g}", None, limit, how)
    if value > limit:
        text = f"{name} {digits(value)} is {value - limit:.6g} above the {limit:g} allowed"
        return GateRule(
            rule, False, text, value, limit, how, f"a limit of {digits(value)} or more would have passed it"
        )
    text = f"{name} {digits(value)} is within the {limit:g} allowed"
    return GateRule(rule, True, text, value, limit, how, f"a limit below {digits(value)} would have stopped it")


def _lower_limit_rule(name: str, limit: float, value: float) -> GateRule:
    rule, how = f"require.{name}", f"{name} of the candidate over the whole test set, at least {limit:g}"
    if not math.isfinite(value):
        return GateRule(rule, False, f"{name} is not finite, required is {limit:g}", None, limit, how)
    if value < limit:
        text = f"{name} {digits(value)} is {limit - value:.6g} below the required {limit:g}"
        change = f"a limit of {digits(value)} or less would have passed it"
        return GateRule(rule, False, text, value, limit, how, change)
    text = f"{name} {digits(value)} reaches the required {limit:g}"
    return GateRule(rule, True, text, value, limit, how, f"a limit above {digits(value)} would have stopped it")


def comparison_rule(config: Evaluate, comparison: Comparison | None, reason: str) -> GateRule:
    """Require the interval's lower end to lie above -margin (or, to be superior, above the margin), strictly.

    With that limit inside the interval, or where a few samples decide the interval, the test set cannot decide:
    inconclusive. `reason`: why there is no comparison.
    """
    name, bound = config.rule, _bound(config)
    if comparison is None:
        text = f"{config.metric} cannot be compared with the {config.opponent}: {reason}"
        return decide_inconclusive(config, GateRule(name, False, text, limit=bound, change="a larger test set"))
    difference, how = comparison.difference, _describe_method(config, comparison, bound)
    low, text = difference.low, f"{config.metric} is {position(difference.estimate, config.opponent)}"
    worst = comparison.worst
    if low > bound and worst is not None and worst[1] > _DOMINATED and 100 * worst[0] <= comparison.samples:
        text += f", but this depends on how frequent large errors are: {_describe_worst(comparison, worst)}"
        return decide_inconclusive(config, GateRule(name, False, text, low, bound, how, LIMIT_ERRORS))
    if low > bound:
        text = f"{config.metric} is at {'most' if low < 0 else 'least'} {position(low, config.opponent)}"
        return GateRule(name, True, text, low, bound, how, _would_fail(config, low))
    required = f"{position(bound)} is {'required' if bound > 0 else 'allowed'}" if bound else "it must be better"
    text += f" and may be {position(low)}; {required}"
    rule = GateRule(name, False, text, low, bound, how, _would_pass(config, comparison, bound))
    # A wider interval of a later comparison must not make a clear failure inconclusive.
    high = (comparison.single or difference).high
    return decide_inconclusive(config, rule) if high > bound else rule


LIMIT_ERRORS = "use a metric that few samples cannot decide, such as a capped error, or more test samples"


def decide_inconclusive(config: Evaluate, rule: GateRule) -> GateRule:
    """Decide a rule that the test set is too small to decide."""
    return replace(rule, passed=config.inconclusive == "pass", inconclusive=True, detail=f"inconclusive: {rule.detail}")


def samples_needed(samples: int, half_width: float, distance: float) -> int | None:
    """Return how many samples shrink an interval of this half-width to the distance; None if none suffice."""
    if distance <= 0 or not math.isfinite(half_width):
        return None
    return math.ceil(samples * (half_width / distance) ** 2)


def _bound(config: Evaluate) -> float:
    return config.applied_margin if config.rule == "superior" else -config.applied_margin


def _describe_method(config: Evaluate, comparison: Comparison, bound: float) -> str:
    text = (
        f"how much better {config.metric} is than the {config.opponent}'s on the same {comparison.samples} "
        f"{comparison.unit}, {describe_level(config, comparison.count)}; its lower end must be above "
        f"{_format_bound(bound)}"
    )
    if comparison.worst is None:
        return text
    return f"{text}; {_describe_worst(comparison, comparison.worst)}; {comparison.assumption}"


def _describe_worst(comparison: Comparison, worst: tuple[int, float]) -> str:
    of = f"the worst {worst[0]} of {comparison.samples} {comparison.unit}"
    return f"{worst[1]:.0%} of the variance comes from {of}"


def interval_level(config: Evaluate, count: ComparisonCount) -> float:
    """Return the confidence of the interval, which is higher for later comparisons if `evaluate.widen` applies."""
    is_widened = config.widen == "always" or (config.widen == "shared" and count.authors > 1)
    return repeated_confidence(config.confidence, count.number if is_widened else 1)


def describe_level(config: Evaluate, count: ComparisonCount) -> str:
    """Return the level of the interval, after which comparison on the test set it is, unless it is the first."""
    level = interval_level(config, count)
    same = "not widened, " if level == config.confidence else ""
    number = f"comparison {count.number} on this test set, {same}" if count.number > 1 else ""
    return f"{number}{confidence_text(level)} interval"


def _would_fail(config: Evaluate, low: float) -> str:
    if config.rule == "superior":
        return f"a margin of {digits(low)} or more would have stopped it"
    if low > 0:
        return f"no margin would have stopped it: the whole interval is above the {config.opponent}"
    return f"a margin of {digits(-low)} or less would have stopped it"


def _would_pass(config: Evaluate, comparison: Comparison, bound: float) -> str:
    difference = comparison.difference
    margin = difference.low if config.rule == "superior" else -difference.low
    margins = (
        f"a margin {'below' if config.rule == 'superior' else 'above'} {digits(margin)} would have passed it"
        if margin >= 0
        else "no margin would have passed it as `superior`"
    )
    distance, half_width = difference.estimate - bound, difference.estimate - difference.low
    required = samples_needed(comparison.samples, half_width, distance)
    if required is None:
        advice = f"more samples would not, because it is {position(difference.estimate, config.opponent)}"
    else:
        advice = f"so would about {required} test samples with the same difference and variance"
    if comparison.single is not None and comparison.single.low > bound:
        advice += (
            f"; as the first comparison on a test set, at {confidence_text(config.confidence)}, it would have passed"
        )
    return f"{margins}; {advice}"


def _format_bound(bound: float) -> str:
    return f"{digits(bound, sign=True)}" if bound else "0"
