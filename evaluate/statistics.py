"""Paired statistics: a bootstrap interval of the mean difference and McNemar's exact test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_CHUNK_ELEMENTS = 1 << 22  # 32 MiB of float64 at a time, whatever the size of the test set
_FEW_VALUES = 64


@dataclass(frozen=True)
class Interval:
    """A mean difference, candidate minus baseline, and its confidence bounds."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class McNemar:
    p_value: float
    only_candidate: int  # samples that the candidate alone gets right
    only_baseline: int


def bootstrap_interval(difference: Floats, confidence: float, resamples: int, seed: int) -> Interval:
    """Percentile interval of the mean of per-sample differences, resampling samples with replacement."""
    generator = np.random.default_rng(seed)
    values, counts = np.unique(difference, return_counts=True)
    if len(values) <= _FEW_VALUES:
        means = _means_of_counts(values, counts, resamples, generator)
    else:
        means = _means_of_gathers(difference, resamples, generator)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(difference.mean()), float(low), float(high))


def mcnemar(candidate: Floats, baseline: Floats) -> McNemar | None:
    """The exact test, when both are right or wrong on each sample (1 or 0) and nothing between; else None."""
    if not all(np.isin(values, (0.0, 1.0)).all() for values in (candidate, baseline)):
        return None
    only_candidate = int(((candidate == 1) & (baseline == 0)).sum())
    only_baseline = int(((candidate == 0) & (baseline == 1)).sum())
    return McNemar(binomial_two_sided(only_candidate, only_baseline), only_candidate, only_baseline)


def binomial_two_sided(a: int, b: int) -> float:
    """Probability of a split at least as uneven as a : b when both sides are equally likely."""
    total, smaller = a + b, min(a, b)
    if a == b:
        return 1.0
    # log C(total, i) for i = 0 … smaller, as a running sum: the coefficients themselves overflow.
    i = np.arange(1, smaller + 1, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log(total - i + 1) - np.log(i))])
    peak = float(logs.max())
    log_sum = peak + math.log(float(np.exp(logs - peak).sum()))
    return min(1.0, math.exp(log_sum + math.log(2) * (1 - total)))


def _means_of_counts(
    values: Floats, counts: np.ndarray[Any, Any], resamples: int, generator: np.random.Generator
) -> Floats:
    """How often each distinct value is drawn is multinomial: the same distribution, without touching samples."""
    total = int(counts.sum())
    share = counts / total
    chunks = (
        generator.multinomial(total, share, size=size) @ values / total for size in _chunks(resamples, len(values))
    )
    return np.concatenate(list(chunks))


def _means_of_gathers(difference: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    count = len(difference)
    chunks = (
        difference[generator.integers(count, size=(size, count))].mean(axis=1) for size in _chunks(resamples, count)
    )
    return np.concatenate(list(chunks))


def _chunks(resamples: int, width: int) -> list[int]:
    """Sizes that add up to `resamples`, each of few enough rows of this width."""
    size = max(1, _CHUNK_ELEMENTS // width)
    return [min(size, resamples - start) for start in range(0, resamples, size)]
