"""Confidence intervals of a metric, and of the difference of two models on the same samples.

Right and wrong answers have score intervals, which hold for few samples and near 0 and 1. Everything else has Student's
interval, widened for skewness, where only samples in which the two models differ count as degrees of freedom.

T. Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
Statistics in Medicine 17 (1998). P. Hall, "On the removal of skewness by transformation", JRSS B 54 (1992).
R. Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic", Statistics in
Medicine 25 (2006). G. Zou and A. Donner, "Construction of confidence limits about effect measures", Statistics in
Medicine 27 (2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # type: ignore[import-untyped]

from pipeline.statistics.aggregates import Auc, Average, Floats, Mean, Statistic

_MAX_JACKKNIFE_UNITS = 256  # up to here leaving out each unit in turn is cheap; beyond, derivatives are as good
_MIN_DIFFERING = 2  # with fewer samples that differ, nothing is known about the size of a difference
_BISECTIONS = 60


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence bounds."""

    estimate: float
    low: float
    high: float


def metric_interval(statistic: Statistic, confidence: float) -> Interval | None:
    """Return the interval of one model's metric; None if it is undefined, or if too few samples differ."""
    estimate = statistic.estimate
    if statistic.units < 2 or not math.isfinite(estimate):
        return None
    if isinstance(statistic, Mean) and np.isin(statistic.column, (0.0, 1.0)).all():
        return proportion_interval(int(statistic.column.sum()), statistic.units, confidence)
    lifts = _lifts(statistic.values, statistic, None)
    interval = _skewed_t(estimate, lifts, statistic.informative(None), confidence)
    if (limits := statistic.limits) is None:
        return interval
    if isinstance(statistic, Auc | Average):
        interval = _union(interval, _auc_interval(statistic, estimate, confidence))
    reach = _unseen_share(statistic.smallest_group, confidence) * (limits[1] - limits[0])
    interval = interval or Interval(estimate, estimate - reach, estimate + reach)
    return Interval(estimate, max(interval.low, limits[0]), min(interval.high, limits[1]))


def difference_interval(first: Statistic, second: Statistic, confidence: float) -> Interval | None:
    """Return the interval of the difference of two models on the same samples; None as for `metric_interval`."""
    estimate = first.estimate - second.estimate + 0.0  # never -0
    if first.units < 2 or not math.isfinite(estimate):
        return None
    columns = [each.column for each in (first, second) if isinstance(each, Mean)]
    if len(columns) == 2 and (step := _step(*columns)) is not None:
        return _of_one_size(columns[0] - columns[1], step, confidence)
    lifts = _lifts(lambda weights: first.values(weights) - second.values(weights), first, second)
    interval = _skewed_t(estimate, lifts, first.informative(second), confidence)
    if first.limits is None:
        return interval
    if isinstance(first, Auc | Average) and isinstance(second, Auc | Average):
        interval = _union(interval, _auc_difference(first, second, confidence))
    reach = first.limits[1] - first.limits[0]
    unseen = _unseen_share(first.smallest_group, confidence) * reach
    interval = interval or Interval(estimate, estimate - unseen, estimate + unseen)
    return Interval(estimate, max(interval.low, -reach), min(interval.high, reach))


def proportion_interval(hits: int, count: int, confidence: float) -> Interval:
    """Return the mid-p interval of a proportion: the exact one of Clopper and Pearson, less its excess width."""
    tail = (1 - confidence) / 2

    def from_below(p: float) -> bool:
        """Return True while this proportion is too small to explain so many hits."""
        more, at_least = (
            float(scipy.special.bdtrc(hits, count, p)),
            float(scipy.special.bdtrc(hits - 1, count, p)) if hits else 1.0,
        )
        return (more + at_least) / 2 < tail

    def from_above(p: float) -> bool:
        fewer, at_most = (
            float(scipy.special.bdtr(hits - 1, count, p)) if hits else 0.0,
            float(scipy.special.bdtr(hits, count, p)),
        )
        return (fewer + at_most) / 2 >= tail

    estimate = hits / count
    low = _bisect(from_below, 0.0, estimate) if hits else 0.0
    high = _bisect(from_above, estimate, 1.0) if hits < count else 1.0
    return Interval(estimate, low, high)


def paired_proportions_interval(only_first: int, only_second: int, count: int, confidence: float) -> Interval:
    """Return Tango's score interval of the difference of two proportions of the same samples."""
    estimate, z = (only_first - only_second) / count, float(scipy.special.ndtri((1 + confidence) / 2))

    def score(difference: float) -> float:
        """Return how many standard errors the difference is below the estimate, under the variance it implies."""
        b = (2 * count - only_first + only_second) * difference - only_first - only_second
        c = -only_second * difference * (1 - difference)
        share = (math.sqrt(max(b * b - 8 * count * c, 0.0)) - b) / (4 * count)
        variance = count * (2 * share + difference * (1 - difference))
        distance = count * (estimate - difference)
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    low = _bisect(lambda difference: score(difference) > z, -1.0, estimate)
    high = _bisect(lambda difference: score(difference) > -z, estimate, 1.0)
    return Interval(estimate, low, high)


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _step(*columns: Floats) -> float | None:
    """Return the distance between the two values that occur, such as 0 and 1; None if there are others."""
    values = np.unique(np.concatenate(columns))
    if set(values.tolist()) <= {0.0, 1.0}:
        return 1.0
    return float(values[1] - values[0]) if len(values) == 2 else None


def _of_one_size(difference: Floats, size: float, confidence: float) -> Interval:
    """Return the interval of differences that are 0 or of one size, as those of right and wrong answers are."""
    gains, losses = int((difference > 0).sum()), int((difference < 0).sum())
    interval = paired_proportions_interval(gains, losses, len(difference), confidence)
    return Interval(interval.estimate * size, interval.low * size, interval.high * size)


def _unseen_share(count: int, confidence: float) -> float:
    """Return the largest share of samples that differ although none of so many does (Tango's bound)."""
    square: float = float(scipy.special.ndtri((1 + confidence) / 2)) ** 2
    return square / (count + square)


def _lifts(values: Callable[[Floats], Floats], first: Statistic, second: Statistic | None) -> Floats:
    """Return by how much each unit lifts the statistic: by leaving it out while units are few, else by derivative."""
    units = first.units
    if isinstance(first, Mean) or units > _MAX_JACKKNIFE_UNITS:
        return first.influence() - (0.0 if second is None else second.influence())
    left_out = np.concatenate([values(weights) for weights in _leave_one_out(units)])
    finite = left_out[np.isfinite(left_out)]
    lifts: Floats = (units - 1) * (finite.mean() - finite) if len(finite) else np.zeros(0)
    return lifts


def _leave_one_out(units: int) -> list[Floats]:
    rows = max(1, (1 << 19) // units)
    parts = []
    for start in range(0, units, rows):
        weights = np.ones((min(rows, units - start), units))
        weights[np.arange(len(weights)), start + np.arange(len(weights))] = 0.0
        parts.append(weights)
    return parts


def _skewed_t(estimate: float, lifts: Floats, informative: int, confidence: float) -> Interval | None:
    """Return Student's interval, on each side as wide as Hall's correction for skewness makes it, if that is wider."""
    squares: float = float((lifts**2).sum())
    count = len(lifts)
    if informative < _MIN_DIFFERING or count < 2 or squares == 0.0:
        return None
    t = float(scipy.special.stdtrit(informative - 1, (1 + confidence) / 2))
    deviation, root = math.sqrt(squares / (count - 1)), math.sqrt(count)
    skewness: float = float((lifts**3).mean()) / (squares / count) ** 1.5

    def corrected(quantile: float) -> float:
        shifted = quantile / root - skewness / (6 * count)
        return shifted if abs(skewness) < 1e-6 else 3 / skewness * (math.cbrt(1 + skewness * shifted) - 1)

    below, above = max(t / root, corrected(t)), max(t / root, -corrected(-t))
    return Interval(estimate, estimate - deviation * below, estimate + deviation * above)


def _union(first: Interval | None, second: Interval) -> Interval | None:
    if first is None:
        return None
    return Interval(first.estimate, min(first.low, second.low), max(first.high, second.high))


def _auc_interval(statistic: Statistic, auc: float, confidence: float) -> Interval:
    """Return Newcombe's score interval (his method 5), whose variance does not vanish at an AUC of 1."""
    positive, negative = statistic.smallest_group, statistic.units - statistic.smallest_group
    z, others = float(scipy.special.ndtri((1 + confidence) / 2)), statistic.units / 2 - 1

    def is_near(value: float) -> bool:
        spread = value * (1 - value) * (1 + others * ((1 - value) / (2 - value) + value / (1 + value)))
        return abs(auc - value) <= z * math.sqrt(max(spread, 0.0) / (positive * negative))

    low = _bisect(lambda value: not is_near(value), 0.0, auc)
    return Interval(auc, low, _bisect(is_near, auc, 1.0))


def _auc_difference(first: Statistic, second: Statistic, confidence: float) -> Interval:
    """Return the interval of a difference from those of both AUC and their correlation (Zou and Donner)."""
    a, b = (_auc_interval(each, each.estimate, confidence) for each in (first, second))
    x, y = first.influence(), second.influence()
    scale = math.sqrt(float((x**2).sum()) * float((y**2).sum()))
    correlation = float((x * y).sum()) / scale if scale else 0.0

    def width(one: float, other: float) -> float:
        return math.sqrt(max(one**2 + other**2 - 2 * correlation * one * other, 0.0))

    estimate = a.estimate - b.estimate
    below, above = width(a.estimate - a.low, b.high - b.estimate), width(a.high - a.estimate, b.estimate - b.low)
    return Interval(estimate, estimate - below, estimate + above)
