"""Bootstrap confidence intervals: bias-corrected and accelerated (BCa), for means and for other statistics, paired.

B. Efron, "Better Bootstrap Confidence Intervals", JASA 82 (1987).

A statistic that is not a mean over samples is computed for each resample while samples are few. With many samples it is
replaced by its value plus the mean of each sample's influence (infinitesimal jackknife): then it is a mean, and the
error of that shrinks faster with the number of samples than the interval does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Method: TypeAlias = Literal["bca", "percentile"]

BOOTSTRAP_SEED = 0  # fixed, so that the verdict cannot be changed by trying seeds
_CHUNK_ELEMENTS = 1 << 18  # draws at a time, so that they stay in the CPU cache
_MAX_DRAWS = 50_000_000  # one by one; with more, neighboring values are grouped
_MAX_DISTINCT = 64
_VALUE_GROUPS = 1024  # of neighboring values
_EXTREMES = 256  # values at each end that are not grouped: they carry most of the variance of a long tail
_MAX_LOST_VARIANCE = 1e-4  # fraction of the variance that grouping may lose
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimated mean and its confidence bounds."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Floats, confidence: float, resamples: int, seed: int, method: Method = "bca") -> Interval:
    """Return the interval of the mean of per-sample values, such as differences of two models on the same samples."""
    estimate = float(values.mean())
    if len(values) == 1 or float(np.ptp(values)) == 0.0:
        return Interval(estimate, estimate, estimate)
    means = resampled_means(values, resamples, seed)
    if method == "bca":
        return bca_interval(means, values - estimate, estimate, confidence)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))


def bca_interval(values: Floats, lifts: Floats, estimate: float, confidence: float) -> Interval:
    """Return the BCa interval of a statistic from its resampled values and the lift by each sample."""
    if float(np.ptp(values)) == 0.0 or not float((lifts**2).sum()):
        return Interval(estimate, estimate, estimate)
    low, high = np.quantile(values, _bca_levels(lifts, values, estimate, (1 - confidence) / 2))
    return Interval(estimate, float(low), float(high))


def resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Return means of resamples of the same size, drawn with replacement."""
    generator = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) > _MAX_DISTINCT and len(values) * resamples <= _MAX_DRAWS:
        return _means_of_draws(values, resamples, generator)
    if len(distinct) > _VALUE_GROUPS and (grouped := _group(distinct, counts)):
        distinct, counts = grouped
    elif len(distinct) > _VALUE_GROUPS:
        return _means_of_draws(values, resamples, generator)
    return _means_of_counts(distinct, counts, resamples, generator)


def _bca_levels(lifts: Floats, means: Floats, estimate: float, tail: float) -> tuple[float, float]:
    """Return the quantiles of the resampled means that bound the interval; ties count half on each side."""
    count = len(means)
    count_below = (int((means < estimate).sum()) + int((means <= estimate).sum())) / 2
    bias = _NORMAL.inv_cdf(min(max(count_below, 0.5), count - 0.5) / count)
    acceleration = float((lifts**3).sum()) / (6 * float((lifts**2).sum()) ** 1.5)

    def level(z: float) -> float:
        shifted = bias + z
        return _NORMAL.cdf(bias + shifted / (1 - acceleration * shifted))

    z = _NORMAL.inv_cdf(1 - tail)
    return level(-z), level(z)


def _means_of_draws(values: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    count = len(values)
    rows = (generator.integers(count, size=(size, count)) for size in _chunks(resamples, count))
    return np.concatenate([values.take(row).mean(axis=1) for row in rows])


def _means_of_counts(values: Floats, counts: Counts, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw how often each distinct value occurs (multinomial), which is the same distribution and much faster."""
    total = int(counts.sum())
    samples = (generator.multinomial(total, counts / total, size=size) for size in _chunks(resamples, len(values)))
    return np.concatenate([row @ values / total for row in samples])


def _group(distinct: Floats, counts: Counts) -> tuple[Floats, Counts] | None:
    """Replace neighboring values by their mean, which loses only the variance within groups.

    None if that is too much.
    """
    counts_before = np.cumsum(counts[_EXTREMES:-_EXTREMES])
    group = np.minimum(counts_before * _VALUE_GROUPS // (counts_before[-1] + 1), _VALUE_GROUPS - 1)
    starts = _EXTREMES + np.flatnonzero(np.diff(group, prepend=-1))
    bounds = np.concatenate([np.arange(_EXTREMES), starts, np.arange(len(distinct) - _EXTREMES, len(distinct))])
    merged = np.add.reduceat(counts, bounds)
    means = np.add.reduceat(counts * distinct, bounds) / merged
    variance = np.average((distinct - np.average(distinct, weights=counts)) ** 2, weights=counts)
    lost_variance = np.average(
        (distinct - np.repeat(means, np.diff(bounds, append=len(distinct)))) ** 2, weights=counts
    )
    return (means, merged) if lost_variance <= _MAX_LOST_VARIANCE * variance else None


def _chunks(resamples: int, width: int) -> Iterator[int]:
    """Yield sizes that add up to `resamples`, each a number of rows of this width that fits into a chunk."""
    size = max(1, _CHUNK_ELEMENTS // width)
    yield from (min(size, resamples - start) for start in range(0, resamples, size))


_MAX_AGGREGATE_DRAWS = 20_000_000  # samples times resamples; beyond, influences are used
_AGGREGATE_CHUNK_ELEMENTS = 1 << 19
_MAX_JACKKNIFE_UNITS = 2048  # up to here leaving out each unit in turn is cheap
_MAX_UNDEFINED_FRACTION = 0.01  # of the resamples
_BINS = 15


class Statistic(Protocol):
    @property
    def units(self) -> int:
        """Number of samples or queries."""

    def values(self, weights: Floats) -> Floats:
        """Return one value for each row of weights, [rows, units]; NaN where it is undefined."""

    def influence(self) -> Floats:
        """Return the derivative of the value by the weight of each unit; the mean is 0."""


def point_estimate(statistic: Statistic) -> float:
    if isinstance(statistic, Mean):
        return float(statistic.column.mean())
    return float(statistic.values(np.ones((1, statistic.units)))[0])


def contributions(candidate: Statistic, baseline: Statistic | None, better: int = 1) -> Floats:
    """Return values per unit with the mean and variance of the statistic, or of the difference of two."""
    if baseline is None:
        return better * (point_estimate(candidate) + candidate.influence())
    return better * (
        point_estimate(candidate) - point_estimate(baseline) + (candidate.influence() - baseline.influence())
    )


def aggregate_interval(
    candidate: Statistic, baseline: Statistic | None, confidence: float, resamples: int, seed: int, better: int = 1
) -> Interval | None:
    """Return the interval of a statistic, or of the difference of two on the same units; None if it is undefined."""
    units = candidate.units
    estimate = (
        better * (point_estimate(candidate) - (0.0 if baseline is None else point_estimate(baseline))) + 0.0
    )  # never -0
    if units < 2 or not math.isfinite(estimate):
        return None
    if units * resamples > _MAX_AGGREGATE_DRAWS:
        return mean_interval(contributions(candidate, baseline, better), confidence, resamples, seed)

    def values(weights: Floats) -> Floats:
        baseline_values = 0.0 if baseline is None else baseline.values(weights)
        difference: Floats = better * (candidate.values(weights) - baseline_values)
        return difference

    statistics = np.concatenate([values(weights) for weights in _resamples(units, resamples, seed)])
    finite = statistics[np.isfinite(statistics)]
    if len(finite) < (1 - _MAX_UNDEFINED_FRACTION) * resamples:
        return None
    lifts = (
        _jackknife_lifts(values, units)
        if units <= _MAX_JACKKNIFE_UNITS
        else contributions(candidate, baseline, better) - estimate
    )
    return bca_interval(finite, lifts[np.isfinite(lifts)], estimate, confidence)


def _resamples(units: int, resamples: int, seed: int) -> Iterator[Floats]:
    """Yield how often each unit is drawn, with replacement."""
    generator = np.random.default_rng(seed)
    size = max(1, _AGGREGATE_CHUNK_ELEMENTS // units)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        indices = generator.integers(units, size=(rows, units)) + np.arange(rows)[:, None] * units
        yield np.bincount(indices.ravel(), minlength=rows * units).reshape(rows, units).astype(np.float64)


def _jackknife_lifts(values: Callable[[Floats], Floats], units: int) -> Floats:
    """Return by how much each unit lifts the statistic, from the values with one unit left out."""
    size = max(1, _AGGREGATE_CHUNK_ELEMENTS // units)
    parts = []
    for start in range(0, units, size):
        rows = min(size, units - start)
        weights = np.ones((rows, units))
        weights[np.arange(rows), start + np.arange(rows)] = 0.0
        parts.append(values(weights))
    left_out = np.concatenate(parts)
    finite = left_out[np.isfinite(left_out)]
    result: Floats = finite.mean() - finite if len(finite) else finite
    return result


@dataclass(frozen=True)
class Mean:
    column: Floats

    @property
    def units(self) -> int:
        return len(self.column)

    def values(self, weights: Floats) -> Floats:
        means: Floats = weights @ self.column / weights.sum(axis=1)
        return means

    def influence(self) -> Floats:
        lifts: Floats = self.column - self.column.mean()
        return lifts


@dataclass(frozen=True)
class RootMean:
    """Root of the mean of squared errors (RMSE)."""

    squares: Floats

    @property
    def units(self) -> int:
        return len(self.squares)

    def values(self, weights: Floats) -> Floats:
        roots: Floats = np.sqrt(weights @ self.squares / weights.sum(axis=1))
        return roots

    def influence(self) -> Floats:
        root = math.sqrt(float(self.squares.mean()))
        lifts: Floats = (self.squares - self.squares.mean()) / (2 * root) if root else np.zeros(self.units)
        return lifts


@dataclass(frozen=True)
class ExplainedVariance:
    """Explained fraction of the variance of the labels (R²); undefined if all labels are equal."""

    squares: Floats  # of the errors
    actual: Floats

    @property
    def units(self) -> int:
        return len(self.squares)

    def values(self, weights: Floats) -> Floats:
        total, centred = weights.sum(axis=1), self.actual - self.actual.mean()
        variance = weights @ centred**2 / total - (weights @ centred / total) ** 2
        return 1 - _ratio(weights @ self.squares / total, np.where(variance > _rounding_error(centred), variance, 0.0))

    def influence(self) -> Floats:
        deviations = (self.actual - self.actual.mean()) ** 2
        variance, error = float(deviations.mean()), float(self.squares.mean())
        lifts: Floats = -(self.squares - error) / variance + error * (deviations - variance) / variance**2
        return lifts


class Ranks:
    """Mid-ranks of one column under weights: the weight below each value plus half of the weight on it."""

    def __init__(self, column: Floats) -> None:
        self.order = np.argsort(column, kind="stable")
        ordered = column[self.order]
        is_new_value = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        self.starts = np.flatnonzero(is_new_value)
        self.group = np.empty(len(column), np.int64)
        self.group[self.order] = np.cumsum(is_new_value) - 1

    def sums(self, weights: Floats) -> Floats:
        """Return the weight of each distinct value, ascending."""
        return np.add.reduceat(weights[:, self.order], self.starts, axis=1)

    def below(self, weights: Floats) -> Floats:
        """Return for each distinct value the weight below it plus half of the weight on it."""
        sums = self.sums(weights)
        ranks: Floats = np.cumsum(sums, axis=1) - sums / 2
        return ranks

    def above(self, values: Floats) -> Floats:
        """Return for each sample the mean of `values` over samples above it, plus half over those equal to it."""
        sums = self.sums(values[None])[0]
        means: Floats = ((sums.sum() - np.cumsum(sums) + sums / 2) / len(values))[self.group]
        return means


class Spearman:
    """Rank correlation; undefined if one side is constant."""

    def __init__(self, first: Floats, second: Floats) -> None:
        self._x, self._y, self.units = Ranks(first), Ranks(second), len(first)

    def values(self, weights: Floats) -> Floats:
        total = weights.sum(axis=1, keepdims=True)
        u = (self._x.below(weights) / total)[:, self._x.group] - 0.5
        v = (self._y.below(weights) / total)[:, self._y.group] - 0.5
        joint, x_squares, y_squares = ((weights * a * b).sum(axis=1) for a, b in ((u, v), (u, u), (v, v)))
        product = x_squares * y_squares
        return _ratio(joint, np.sqrt(np.where(product > 1e-18 * total[:, 0] ** 2, product, 0.0)))

    def influence(self) -> Floats:
        return self._influence

    @cached_property
    def _influence(self) -> Floats:
        ones = np.ones((1, self.units))
        u = (self._x.below(ones)[0] / self.units)[self._x.group]
        v = (self._y.below(ones)[0] / self.units)[self._y.group]
        a, b, c = float((u * v).mean()), float((u * u).mean()), float((v * v).mean())
        joint = u * v + self._x.above(v) + self._y.above(u) - 3 * a
        x_lifts, y_lifts = u * u + 2 * self._x.above(u) - 3 * b, v * v + 2 * self._y.above(v) - 3 * c
        a, b, c = a - 0.25, b - 0.25, c - 0.25
        lifts: Floats = (joint - a / 2 * (x_lifts / b + y_lifts / c)) / math.sqrt(b * c)
        return lifts


class Auc:
    """Probability that a positive sample scores higher, ties count half; undefined without both kinds."""

    def __init__(self, scores: Floats, positive: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        self._ranks, self.units = Ranks(scores), len(scores)
        self._positive = positive.astype(np.float64)

    def values(self, weights: Floats) -> Floats:
        positive = self._ranks.sums(weights * self._positive)
        below = self._ranks.below(weights * (1 - self._positive))
        pairs = (weights @ self._positive) * (weights @ (1 - self._positive))
        return _ratio((positive * below).sum(axis=1), pairs)

    def influence(self) -> Floats:
        return self._influence

    @cached_property
    def _influence(self) -> Floats:
        positive, negative = self._positive, 1 - self._positive
        auc = point_estimate(self)
        fraction_below = (self._ranks.below(negative[None])[0] / negative.sum())[self._ranks.group]
        fraction_above = self._ranks.above(positive) * self.units / positive.sum()
        lifts: Floats = (
            positive * (fraction_below - auc) / positive.mean() + negative * (fraction_above - auc) / negative.mean()
        )
        return lifts


@dataclass(frozen=True)
class Average:
    """Of several, over those that are defined."""

    parts: Sequence[Statistic]

    @property
    def units(self) -> int:
        return self.parts[0].units

    def values(self, weights: Floats) -> Floats:
        values = np.stack([part.values(weights) for part in self.parts])
        is_known = np.isfinite(values)
        return _ratio(np.where(is_known, values, 0.0).sum(axis=0), is_known.sum(axis=0).astype(np.float64))

    def influence(self) -> Floats:
        lifts: Floats = np.mean([part.influence() for part in self.parts], axis=0)
        return lifts


class CalibrationError:
    """ECE: the gap between stated and true in each bin of equal width, weighed by samples."""

    def __init__(self, confidence: Floats, is_right: Floats) -> None:
        self._bin_index = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        self._gaps, self.units = confidence - is_right, len(confidence)

    @cached_property
    def _by_bin(self) -> Floats:
        gaps = np.zeros((self.units, _BINS))
        gaps[np.arange(self.units), self._bin_index] = self._gaps
        return gaps

    def values(self, weights: Floats) -> Floats:
        errors: Floats = np.abs(weights @ self._by_bin).sum(axis=1) / weights.sum(axis=1)
        return errors

    def influence(self) -> Floats:
        signs = np.sign(self._by_bin.sum(axis=0))[self._bin_index]
        lifts: Floats = signs * self._gaps - float((signs * self._gaps).mean())
        return lifts


def _ratio(part: Floats, whole: Floats) -> Floats:
    ratios: Floats = np.divide(part, whole, out=np.full(len(part), math.nan), where=whole > 0)
    return ratios


def _rounding_error(centred: Floats) -> float:
    """Return the variance below which values are constant up to rounding."""
    return 1e-14 * float((centred**2).max(initial=0.0))
