"""Metrics as functions of weighted samples: means, RMSE, R², Spearman's correlation, AUC, calibration errors.

Each knows the influence of every sample on its value, which its confidence interval needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Limits: TypeAlias = tuple[float, float]

_BINS = 15


class Statistic(ABC):
    """A metric of one model on the samples or queries of the test set, its units."""

    @property
    def units(self) -> int:
        return len(self.features())

    @property
    def limits(self) -> Limits | None:
        """The smallest and the largest possible value; None if they are unknown."""
        return None

    @property
    def smallest_group(self) -> int:
        """Number of units of the kind that has fewest, such as the positive ones of an AUC."""
        return self.units

    @cached_property
    def estimate(self) -> float:
        return float(self.values(np.ones((1, self.units)))[0])

    @abstractmethod
    def values(self, weights: Floats) -> Floats:
        """Return one value for each row of weights, [rows, units]; NaN where it is undefined."""

    @abstractmethod
    def influence(self) -> Floats:
        """Return the derivative of the value by the weight of each unit; the mean is 0."""

    @abstractmethod
    def features(self) -> Floats:
        """Return for each unit what the value depends on, [units, columns]."""

    def informative(self, other: Statistic | None) -> int:
        """Return how many units differ from those of the other model, or without one, from the most common unit."""
        return int(self._differing(other).sum())

    def _differing(self, other: Statistic | None) -> Bools:
        own = self.features()
        if other is None:
            _, value, counts = np.unique(own, axis=0, return_inverse=True, return_counts=True)
            is_rare: Bools = np.asarray(value.ravel() != counts.argmax())
            return is_rare | bool(counts.max() == 1)
        differing: Bools = (own != other.features()).any(axis=1)
        return differing


def contributions(candidate: Statistic, baseline: Statistic | None, better: int = 1) -> Floats:
    """Return values per unit with the mean and variance of the statistic, or of the difference of two."""
    if baseline is None:
        return better * (candidate.estimate + candidate.influence())
    return better * (candidate.estimate - baseline.estimate + (candidate.influence() - baseline.influence()))


@dataclass(frozen=True)
class Mean(Statistic):
    column: Floats
    limits: Limits | None = None  # of one value

    @cached_property
    def estimate(self) -> float:
        return float(self.column.mean())

    def features(self) -> Floats:
        return self.column[:, None]

    def values(self, weights: Floats) -> Floats:
        means: Floats = weights @ self.column / weights.sum(axis=1)
        return means

    def influence(self) -> Floats:
        lifts: Floats = self.column - self.column.mean()
        return lifts


@dataclass(frozen=True)
class _OfSquares(Statistic):
    squares: Floats  # of the errors

    def features(self) -> Floats:
        return self.squares[:, None]


class RootMean(_OfSquares):
    """Root of the mean of squared errors (RMSE)."""

    def values(self, weights: Floats) -> Floats:
        roots: Floats = np.sqrt(weights @ self.squares / weights.sum(axis=1))
        return roots

    def influence(self) -> Floats:
        root = math.sqrt(float(self.squares.mean()))
        lifts: Floats = (self.squares - self.squares.mean()) / (2 * root) if root else np.zeros(self.units)
        return lifts


@dataclass(frozen=True)
class ExplainedVariance(_OfSquares):
    """Explained fraction of the variance of the labels (R²); undefined if all labels are equal.

    Of forecasts, errors and variances are means over the horizons, each with its own mean.
    """

    actual: Floats

    @property
    def _centred(self) -> Floats:
        centred: Floats = self.actual - self.actual.mean(axis=0, dtype=np.float64).astype(self.actual.dtype)
        return centred.reshape(self.units, -1)

    def values(self, weights: Floats) -> Floats:
        total, centred = weights.sum(axis=1), self._centred
        means = weights.astype(centred.dtype) @ centred / total[:, None]
        variance = weights @ mean_by_sample(centred**2) / total - mean_by_sample(means**2)
        return 1 - ratio(weights @ self.squares / total, np.where(variance > _rounding_error(centred), variance, 0.0))

    def influence(self) -> Floats:
        deviations = mean_by_sample(self._centred**2)
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


class Spearman(Statistic):
    """Rank correlation; undefined if one side is constant."""

    def __init__(self, first: Floats, second: Floats) -> None:
        self._x, self._y = Ranks(first), Ranks(second)

    def features(self) -> Floats:
        return self._x.group[:, None].astype(np.float64)

    def values(self, weights: Floats) -> Floats:
        total = weights.sum(axis=1, keepdims=True)
        u = (self._x.below(weights) / total)[:, self._x.group] - 0.5
        v = (self._y.below(weights) / total)[:, self._y.group] - 0.5
        joint, x_squares, y_squares = ((weights * a * b).sum(axis=1) for a, b in ((u, v), (u, u), (v, v)))
        product = x_squares * y_squares
        return ratio(joint, np.sqrt(np.where(product > 1e-18 * total[:, 0] ** 2, product, 0.0)))

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


class Auc(Statistic):
    """Probability that a positive sample scores higher, ties count half; undefined without both kinds."""

    limits = (0.0, 1.0)

    def __init__(self, scores: Floats, positive: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        self._ranks = Ranks(scores)
        self._positive = positive.astype(np.float64)

    @property
    def units(self) -> int:
        return len(self._positive)

    @property
    def smallest_group(self) -> int:
        positive = int(self._positive.sum())
        return min(positive, self.units - positive)

    def features(self) -> Floats:
        """Return which share of the other kind each sample is above, or below for a negative one."""
        return self._placements[:, None]

    def informative(self, other: Statistic | None) -> int:
        differing, positive = self._differing(other), self._positive.astype(np.bool_)
        return min(int(differing[positive].sum()), int(differing[~positive].sum()))

    @cached_property
    def _placements(self) -> Floats:
        positive, negative = self._positive, 1 - self._positive
        below = (self._ranks.below(negative[None])[0] / negative.sum())[self._ranks.group]
        above = self._ranks.above(positive) * self.units / positive.sum()
        placements: Floats = positive * below + negative * above
        return placements

    def values(self, weights: Floats) -> Floats:
        positive = self._ranks.sums(weights * self._positive)
        below = self._ranks.below(weights * (1 - self._positive))
        pairs = (weights @ self._positive) * (weights @ (1 - self._positive))
        return ratio((positive * below).sum(axis=1), pairs)

    def influence(self) -> Floats:
        return self._influence

    @cached_property
    def _influence(self) -> Floats:
        positive, negative = self._positive, 1 - self._positive
        lifts: Floats = (self._placements - self.estimate) * (positive / positive.mean() + negative / negative.mean())
        return lifts


@dataclass(frozen=True)
class Average(Statistic):
    """Of several, over those that are defined."""

    parts: Sequence[Statistic]

    @property
    def units(self) -> int:
        return self.parts[0].units

    @property
    def limits(self) -> Limits | None:
        return self.parts[0].limits

    @property
    def smallest_group(self) -> int:
        return min(part.smallest_group for part in self.parts)

    def features(self) -> Floats:
        return np.hstack([part.features() for part in self.parts])

    def informative(self, other: Statistic | None) -> int:
        others = [None] * len(self.parts) if other is None else other.parts  # type: ignore[attr-defined]
        return max(part.informative(their) for part, their in zip(self.parts, others, strict=True))

    def values(self, weights: Floats) -> Floats:
        values = np.stack([part.values(weights) for part in self.parts])
        is_known = np.isfinite(values)
        return ratio(np.where(is_known, values, 0.0).sum(axis=0), is_known.sum(axis=0).astype(np.float64))

    def influence(self) -> Floats:
        lifts: Floats = np.mean([part.influence() for part in self.parts], axis=0)
        return lifts


class _SumOfGaps(Statistic):
    """Sum over columns of the size of their mean: gaps between stated and true."""

    limits = (0.0, 1.0)

    def __init__(self, gaps: Floats) -> None:
        self._gaps = gaps

    def features(self) -> Floats:
        return self._gaps

    def values(self, weights: Floats) -> Floats:
        errors: Floats = np.abs(weights @ self._gaps).sum(axis=1) / weights.sum(axis=1)
        return errors

    def influence(self) -> Floats:
        values = self._gaps @ np.sign(self._gaps.sum(axis=0))
        lifts: Floats = values - values.mean()
        return lifts


class CalibrationError(_SumOfGaps):
    """ECE: the gap between stated and true in each bin of equal width, weighed by samples."""

    def __init__(self, confidence: Floats, is_right: Floats) -> None:
        super().__init__(np.zeros((len(confidence), _BINS)))
        bin_index = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        self._gaps[np.arange(self.units), bin_index] = confidence - is_right


class CoverageError(_SumOfGaps):
    """Mean gap between the level of each quantile and the share of true values at or below it."""

    def __init__(self, shares: Floats, levels: Floats) -> None:
        super().__init__((shares - levels) / len(levels))


def mean_by_sample(values: Floats) -> Floats:
    """Return one number per sample: of a forecast, the mean over its horizons."""
    means: Floats = values if values.ndim == 1 else values.mean(axis=1, dtype=np.float64)
    return means


def ratio(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> Floats:
    ratios: Floats = np.divide(part, whole, out=np.full(len(part), math.nan), where=whole > 0)
    return ratios


def _rounding_error(centred: Floats) -> float:
    """Return the variance below which values are constant up to rounding."""
    return 1e-14 * float((centred**2).max(initial=0.0))
