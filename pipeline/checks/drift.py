"""Do two histograms come from one distribution: how far apart (PSI), and by chance or not (KS; z of shares)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pipeline.checks.features import Floats
from pipeline.checks.profile import Feature, Histogram

Counts: TypeAlias = np.ndarray[Any, Any]

_GROUPS = 10  # bins of the population stability index, equally full at first; what lies outside has its own
_ENOUGH = 5.0  # expected in the smaller split, for a share to be judged by the normal distribution


@dataclass(frozen=True)
class Difference:
    psi: float
    p: float
    told: str  # the largest of it, in words


def differences(
    features: tuple[Feature, ...], before: Mapping[str, Histogram], after: Mapping[str, Histogram]
) -> dict[str, Difference]:
    """By the feature's name, where both have one and something in it."""
    found = {}
    for feature in features:
        a, b = before.get(feature.name), after.get(feature.name)
        if a is not None and b is not None and any(a.bins) and any(b.bins):
            found[feature.name] = _of_ids(feature, a, b) if feature.kind == "ids" else _of_numbers(a, b)
    return found


def psi(before: Counts, after: Counts) -> float:
    """Population stability index of counts; half a count in each bin keeps an empty one from making it infinite."""
    a, b = before + 0.5, after + 0.5
    a, b = a / a.sum(), b / b.sum()
    found: Floats = (b - a) * np.log(b / a)
    return float(found.sum())


def kolmogorov(distance: float, n: int, m: int) -> float:
    """Chance of such a distance between samples of one distribution (Stephens' form); of histograms, at most that."""
    root = math.sqrt(n * m / (n + m))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.1:  # the series takes ever more terms, and it is certain to many digits
        return 1.0
    terms = [(1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * sum(terms)))


def _of_numbers(before: Histogram, after: Histogram) -> Difference:
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    gaps = np.abs(np.cumsum(a) / a.sum() - np.cumsum(b) / b.sum())
    distance = float(gaps.max())
    groups = _groups(a)
    told = f"KS distance {distance:.3f}"
    if before.mean is not None and after.mean is not None:
        told += f", mean {before.mean:.4g} → {after.mean:.4g}"
    return Difference(
        psi(np.bincount(groups, a), np.bincount(groups, b)), kolmogorov(distance, int(a.sum()), int(b.sum())), told
    )


def _groups(counts: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which tenth of the training split each bin belongs to; the bins outside its range stay alone."""
    inner = counts[1:-1]
    if not inner.sum():
        return np.arange(len(counts))
    middle = np.cumsum(inner) - inner / 2
    tenth = np.unique(np.floor(middle / inner.sum() * _GROUPS), return_inverse=True)[1]
    return np.concatenate([[0], tenth + 1, [tenth.max() + 2]])


def _of_ids(feature: Feature, before: Histogram, after: Histogram) -> Difference:
    names = [*(feature.words or map(str, feature.ids)), "all others"]
    a, b = np.asarray(before.bins, float), np.asarray(after.bins, float)
    squares = np.asarray(before.squares, float) + np.asarray(after.squares, float)
    seldom = _seldom(a + b, squares, before.samples, after.samples)
    place = np.where(seldom, 0, np.cumsum(~seldom))
    z = _scores(a, b, squares, before.samples, after.samples)
    z[seldom] = 0.0
    chances = math.erfc(float(z.max()) / math.sqrt(2)) * max(1, int((~seldom).sum()))
    worst = int(z.argmax())
    told = f"{names[worst]}: {a[worst] / a.sum():.2%} → {b[worst] / b.sum():.2%}"
    return Difference(psi(np.bincount(place, a), np.bincount(place, b)), min(1.0, chances), told)


def _seldom(total: Floats, squares: Floats, n: int, m: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Too few to judge; tokens that come together, as of one text, count as less than so many."""
    apart = total**2 / np.maximum(squares, 1)
    return np.asarray(apart * min(n, m) / (n + m) < _ENOUGH)


def _scores(a: Floats, b: Floats, squares: Floats, n: int, m: int) -> Floats:
    """z of the mean count per sample: samples are independent, the tokens in them are not."""
    mean = (a + b) / (n + m)
    variance = np.maximum(squares / (n + m) - mean**2, 0) * (1 / n + 1 / m)
    gap = np.abs(a / n - b / m)
    return np.where(variance > 0, gap / np.sqrt(np.where(variance > 0, variance, 1)), np.where(gap > 0, 40.0, 0.0))
