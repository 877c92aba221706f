"""Sequential tests by betting, and confidence sequences: they hold however often one looks, and whenever one stops.

A bet on values in [0, 1] multiplies its capital by 1 - f + f * value / limit. If the mean is at most the limit, capital
does not grow on average, so it exceeds 1 / alpha with a probability of at most alpha, ever (Ville's inequality). The
capital of a test is spread over several bets, and over the values at which they begin, so that a change is found after
a long time without one, too.

I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024). J. Shin, A.
Ramdas and A. Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.statistics.aggregates import Floats
from pipeline.statistics.intervals import Interval

# Half of the capital bets on a change by a twentieth, the rest on smaller and larger ones.
_BETS = np.array([0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95])
_SHARES = np.array([1, 2, 11, 2, 2, 2, 1, 1]) / 22
_MOST = 1e200  # capital; more is as good
_LEAST = 1e-9  # limit
_BISECTIONS = 50


@dataclass
class Betting:
    """Tests that means are at most their limits; those of a group have one e-value, the mean of their capitals."""

    limits: Floats
    sizes: Sequence[int]  # of the groups, in the order of the limits
    threshold: float  # of the e-value of a group
    shape: tuple[int, ...] = ()  # of independent streams
    count: int = 0
    capital: Floats = field(init=False)  # of the bets that have begun
    e_values: Floats = field(init=False)
    lowest: Floats = field(init=False)  # e-value
    since: Floats = field(init=False)  # time of the first value after it: something changed
    alarms: Floats = field(init=False)  # time at which it reached the threshold, infinite before
    counts: Floats = field(init=False)  # of the values of each limit
    sums: Floats = field(init=False)
    earlier: Floats = field(init=False)  # [2, …]: counts and sums before that value

    def __post_init__(self) -> None:
        self.capital = np.zeros((*self.shape, len(self.limits), len(_BETS)))
        self.counts, self.sums, *earlier = np.zeros((4, *self.shape, len(self.limits)))
        self.earlier = np.array(earlier)
        groups = (*self.shape, len(self.sizes))
        self.e_values, self.lowest = np.ones(groups), np.ones(groups)
        self.since, self.alarms = np.full((2, *groups), math.inf)

    def update(self, values: Floats, times: Sequence[float] | np.ndarray[Any, Any]) -> None:
        """Add values in time, [time, …streams, limits]; NaN is no value."""
        limits, starts = np.maximum(self.limits, _LEAST), np.cumsum([0, *self.sizes])[:-1]
        scale, kept = _BETS / limits[:, None], 1 - _BETS
        for row, time in zip(values, times, strict=True):
            is_absent = np.isnan(row)
            self.counts = self.counts + ~is_absent
            self.sums = self.sums + np.where(is_absent, 0, row)
            row = np.where(is_absent, limits, row)
            self.count += 1
            self.capital += later_share(self.count - 1) - later_share(self.count)
            self.capital *= kept + scale * row[..., None]
            np.minimum(self.capital, _MOST, out=self.capital)
            totals = np.add.reduceat(self.gains, starts, axis=-1)
            self.e_values = totals / np.asarray(self.sizes) + later_share(self.count)
            self.since = np.where(np.isinf(self.since), time, self.since)
            is_open = np.isinf(self.alarms)
            is_lowest = is_open & (self.e_values <= self.lowest)
            self.lowest = np.where(is_lowest, self.e_values, self.lowest)
            self.since = np.where(is_lowest, math.inf, self.since)
            if is_lowest.any():
                is_of_group = np.repeat(is_lowest, self.sizes, axis=-1)
                self.earlier = np.where(is_of_group, [self.counts, self.sums], self.earlier)
            self.alarms = np.where(is_open & (self.e_values >= self.threshold), time, self.alarms)

    @property
    def gains(self) -> Floats:
        """Return the capital of each limit."""
        return np.asarray(self.capital @ _SHARES)

    def latest(self, group: int, limit: int) -> tuple[float, float]:
        """Return the count and the sum of a limit's values; if its group has an alarm, of those since the change."""
        totals = np.array([self.counts[limit], self.sums[limit]])
        count, total = totals - self.earlier[:, limit] if np.isfinite(self.alarms[group]) else totals
        return float(count), float(total)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for JSON."""
        return {"count": self.count, **{name: getattr(self, name).tolist() for name in _STATE}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        for name in filter(state.__contains__, _STATE):
            setattr(self, name, np.asarray(state[name], np.float64))


_STATE = ("capital", "e_values", "lowest", "since", "alarms", "counts", "sums", "earlier")


def later_share(count: int) -> float:
    """Return the share of the capital that bets only after so many values: one half after the first."""
    return 1 / (1 + math.log2(count + 1))


def share_limits(counts: Floats, total: float, error: float) -> tuple[Floats, Floats]:
    """Return limits of the means of values in [0, 1] whose sums over `total` samples are known (Chernoff).

    Each holds for its mean with a probability of at least 1 - error.
    """
    mean = np.clip(np.asarray(counts, np.float64) / max(total, 1), 0.0, 1.0)
    reach = math.log(1 / error) / max(total, 1)
    return 1 - _upper_limit(1 - mean, reach), _upper_limit(mean, reach)


def _upper_limit(mean: Floats, reach: float) -> Floats:
    """Return the largest mean whose divergence from the one observed is within reach."""
    low, high = mean.copy(), np.ones_like(mean)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_within = divergence(mean, middle) <= reach
        low, high = np.where(is_within, middle, low), np.where(is_within, high, middle)
    return high


def divergence(p: Floats, q: Floats) -> Floats:
    """Return the Kullback-Leibler divergence of two coins; q is not 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(p > 0, p * np.log(p / q), 0.0)
        tails = np.where(p < 1, (1 - p) * np.log((1 - p) / (1 - q)), 0.0)
    return np.asarray(heads + tails)


def mean_interval(total: float, count: float, alpha: float) -> Interval | None:
    """Return the interval of the mean of so many values, all of them 0 or 1.

    Those after each value hold all at once with a probability of at least 1 - alpha.
    """
    if not count:
        return None
    mean = total / count
    low, high = _least(total, count - total, alpha), 1 - _least(count - total, total, alpha)
    return Interval(mean, min(low, mean), max(high, mean))


def _least(ones: float, zeros: float, alpha: float) -> float:
    """Return the smallest mean against which no bet on a larger one has won."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        gains = ones * np.log(1 - _BETS + _BETS / middle) + zeros * np.log(1 - _BETS)
        has_won = float(np.logaddexp.reduce(gains + np.log(_SHARES))) > math.log(2 / alpha)
        low, high = (middle, high) if has_won else (low, middle)
    return low
