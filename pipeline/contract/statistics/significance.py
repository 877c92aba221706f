"""Tests of whether two models differ on the same samples: McNemar's exact one, and the sign-flip permutation.

What a test set can see at all: the smallest true difference that it would show, and corrections for many looks.

Whether stated probabilities are true: Brier score and expected calibration error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pipeline.contract.statistics.bootstrap import Floats

_CHUNK_BYTES = 1 << 21  # of random bits at a time
_FEW_VALUES = 64


@dataclass(frozen=True)
class McNemar:
    p_value: float
    only_candidate: int  # samples that the candidate alone gets right
    only_baseline: int


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


def binomial_at_least(count: int, total: int) -> float:
    """Probability of so many or more of `total`, each as likely as not."""
    if count <= 0:
        return 1.0
    i = np.arange(count, total + 1, dtype=np.float64)
    first = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    logs = first + np.concatenate([[0.0], np.cumsum(np.log(total - i[:-1]) - np.log(i[:-1] + 1))])
    peak = float(logs.max())
    return min(1.0, math.exp(peak + math.log(float(np.exp(logs - peak).sum())) - total * math.log(2)))


def fall_p_value(difference: Floats, resamples: int, seed: int) -> float:
    """One-sided, of so low a sum where each sample's difference might as well have the other sign.

    Exact where all differences are of one size; else by drawn signs, the observed ones counting as one draw.
    """
    sizes, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    if len(sizes) == 1:
        return binomial_at_least(int((difference < 0).sum()), int(counts[0]))
    generator = np.random.default_rng(seed)
    few = len(sizes) <= _FEW_VALUES
    sums = _flips_of_counts(sizes, counts, resamples, generator) if few else _flips(difference, resamples, generator)
    slack = 1e-9 * float(np.abs(difference).sum())
    return (1 + int((sums <= float(difference.sum()) + slack).sum())) / (1 + resamples)


def permutation_p_value(difference: Floats, resamples: int, seed: int) -> float:
    """Two-sided, under "which model gave which answer is a toss-up for every sample".

    The observed assignment counts as one of them, so that the value is never 0 and the test never too bold.
    """
    sizes, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    observed = abs(float(difference.sum()))
    generator = np.random.default_rng(seed)
    few = len(sizes) <= _FEW_VALUES
    sums = _flips_of_counts(sizes, counts, resamples, generator) if few else _flips(difference, resamples, generator)
    slack = 1e-9 * float(np.abs(difference).sum())  # sums in another order differ in their last bits
    return (1 + int((np.abs(sums) >= observed - slack).sum())) / (1 + resamples)


def _flips_of_counts(
    sizes: Floats, counts: np.ndarray[tuple[int], np.dtype[np.int64]], resamples: int, generator: np.random.Generator
) -> Floats:
    """Of samples with equal differences only the number of flipped ones matters, which is binomial."""
    flipped = generator.binomial(counts, 0.5, size=(resamples, len(counts)))
    sums: Floats = (counts - 2 * flipped) @ sizes
    return sums


def _flips(difference: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """A random bit for each sample: the sum of those that keep their sign, twice, less all."""
    width = (len(difference) + 7) // 8
    padded = np.zeros(8 * width)
    padded[: len(difference)] = difference
    tables = _sums_by_byte(padded.reshape(width, 8))
    rows = max(1, _CHUNK_BYTES // width)
    kept = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        bits = np.frombuffer(generator.bytes(size * width), np.uint8).reshape(size, width)
        kept.append(tables[np.arange(width), bits].sum(axis=1))
    sums: Floats = 2 * np.concatenate(kept) - difference.sum()
    return sums


def _sums_by_byte(groups: Floats) -> Floats:
    """For every eight samples, their sum under each of the 256 choices: one look-up instead of eight additions."""
    choices = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float64)
    sums: Floats = groups @ choices.T
    return sums


_POWER = 0.8  # of all such test sets would show it
_NORMAL = NormalDist()


def smallest_difference(difference: Floats, confidence: float, power: float = _POWER) -> float:
    """The true mean difference that so large a share of test sets like this one would tell from none.

    From the spread of what was measured, by the normal approximation. Where no sample differs, the spread is what a
    share of differing samples could be that a set of this size misses entirely (at the same confidence).
    """
    count = len(difference)
    if count < 2:
        return math.inf
    spread = float(np.std(difference, ddof=1))
    if spread == 0.0:
        unseen = 1 - (1 - confidence) ** (1 / count)
        spread = math.sqrt(unseen)  # differences of ±1 on that share of samples
    return (_NORMAL.inv_cdf((1 + confidence) / 2) + _NORMAL.inv_cdf(power)) * spread / math.sqrt(count)


def holm(p_values: Sequence[float]) -> list[float]:
    """S. Holm's step-down correction: the chance of one false alarm among all stays at the level."""
    order = np.argsort(p_values, kind="stable")
    count, running, adjusted = len(p_values), 0.0, [0.0] * len(p_values)
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def shared_confidence(confidence: float, looks: int) -> float:
    """Of each interval, so that all of them hold at once at least so often (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, looks)


_BINS = 15


@dataclass(frozen=True)
class Bin:
    """Of a calibration curve: answers about which the model was so sure."""

    low: float
    high: float
    samples: int
    confidence: float  # mean of what was stated
    accuracy: float  # share that was right


def brier(probabilities: Floats, actual: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """Per sample: the squared distance of a row of probabilities from the truth; 0 is perfect, 2 the worst."""
    wanted = probabilities[np.arange(len(actual)), actual]
    scores: Floats = (probabilities**2).sum(axis=1) - 2 * wanted + 1
    return scores


def curve(stated: Floats, right: Floats, bins: int = _BINS) -> tuple[Bin, ...]:
    """Bins of equal width over [0, 1]; those that nothing fell into are left out."""
    place = np.minimum((stated * bins).astype(np.int64), bins - 1)
    samples = np.bincount(place, minlength=bins)
    sure = np.bincount(place, weights=stated, minlength=bins)
    hits = np.bincount(place, weights=right, minlength=bins)
    return tuple(
        Bin(i / bins, (i + 1) / bins, int(n), float(sure[i] / n), float(hits[i] / n))
        for i, n in enumerate(samples)
        if n
    )


def expected_error(bins: tuple[Bin, ...]) -> float:
    """The mean gap between stated and true, over samples (ECE)."""
    total = sum(one.samples for one in bins)
    return sum(one.samples * abs(one.confidence - one.accuracy) for one in bins) / total
