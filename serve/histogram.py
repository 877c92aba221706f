"""A histogram as Prometheus has it, kept in plain counts until somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts of values up to each bound, and beyond the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, values: Sequence[float]) -> None:
        """Many at once, each of which then costs next to nothing."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + int(more) for count, more in zip(self.counts, found, strict=True)]
        self.total += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        found, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return found
