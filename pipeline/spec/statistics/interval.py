"""Bootstrap intervals of a mean: bias-corrected and accelerated (BCa), and plain percentiles for comparison.

B. Efron, "Better Bootstrap Confidence Intervals", JASA 82 (1987).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Method: TypeAlias = Literal["bca", "percentile"]

_CHUNK_ELEMENTS = 1 << 18  # of draws at a time: they stay in the cache, whatever the size of the test set
_MOST_DRAWS = 50_000_000  # one by one; more are drawn by groups
_FEW_VALUES = 64
_GROUPS = 1024  # of neighbouring values, where samples are many
_EXTREMES = 256  # values at either end that stay by themselves: they carry most of a long tail's variance
_LOST_VARIANCE = 1e-4  # of the whole, that grouping may cost
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimated mean and its confidence bounds."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Floats, confidence: float, resamples: int, seed: int, method: Method = "bca") -> Interval:
    """Of the mean of per-sample values, as differences of two models on the same samples."""
    estimate = float(values.mean())
    if len(values) == 1 or float(np.ptp(values)) == 0.0:
        return Interval(estimate, estimate, estimate)
    means = resampled_means(values, resamples, seed)
    if method == "bca":
        return bca_interval(means, values - estimate, estimate, confidence)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))


def bca_interval(drawn: Floats, apart: Floats, estimate: float, confidence: float) -> Interval:
    """Of any statistic: its resampled values, and how far each sample lifts it."""
    if float(np.ptp(drawn)) == 0.0 or not float((apart**2).sum()):
        return Interval(estimate, estimate, estimate)
    low, high = np.quantile(drawn, _bca_levels(apart, drawn, estimate, (1 - confidence) / 2))
    return Interval(estimate, float(low), float(high))


def resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Means of as many samples again, drawn with replacement."""
    generator = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) > _FEW_VALUES and len(values) * resamples <= _MOST_DRAWS:
        return _means_of_draws(values, resamples, generator)
    if len(distinct) > _GROUPS and (grouped := _group(distinct, counts)):
        distinct, counts = grouped
    elif len(distinct) > _GROUPS:
        return _means_of_draws(values, resamples, generator)
    return _means_of_counts(distinct, counts, resamples, generator)


def _bca_levels(apart: Floats, means: Floats, estimate: float, tail: float) -> tuple[float, float]:
    """Which quantiles of the resampled means bound the interval; ties count half on each side."""
    count = len(means)
    below = (int((means < estimate).sum()) + int((means <= estimate).sum())) / 2
    bias = _NORMAL.inv_cdf(min(max(below, 0.5), count - 0.5) / count)
    acceleration = float((apart**3).sum()) / (6 * float((apart**2).sum()) ** 1.5)

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
    """How often each distinct value is drawn is multinomial: the same distribution, without touching samples."""
    total = int(counts.sum())
    drawn = (generator.multinomial(total, counts / total, size=size) for size in _chunks(resamples, len(values)))
    return np.concatenate([row @ values / total for row in drawn])


def _group(distinct: Floats, counts: Counts) -> tuple[Floats, Counts] | None:
    """Neighbouring values as one, at their mean: means keep their distribution but for the variance within groups.

    None where that is too much of the whole.
    """
    inner = np.cumsum(counts[_EXTREMES:-_EXTREMES])
    place = np.minimum(inner * _GROUPS // (inner[-1] + 1), _GROUPS - 1)
    starts = _EXTREMES + np.flatnonzero(np.diff(place, prepend=-1))
    bounds = np.concatenate([np.arange(_EXTREMES), starts, np.arange(len(distinct) - _EXTREMES, len(distinct))])
    merged = np.add.reduceat(counts, bounds)
    means = np.add.reduceat(counts * distinct, bounds) / merged
    apart = np.average((distinct - np.average(distinct, weights=counts)) ** 2, weights=counts)
    within = np.average((distinct - np.repeat(means, np.diff(bounds, append=len(distinct)))) ** 2, weights=counts)
    return (means, merged) if within <= _LOST_VARIANCE * apart else None


def _chunks(resamples: int, width: int) -> Iterator[int]:
    """Sizes that add up to `resamples`, each of few enough rows of this width."""
    size = max(1, _CHUNK_ELEMENTS // width)
    yield from (min(size, resamples - start) for start in range(0, resamples, size))
