"""Paired significance tests, power and multiple comparisons, and calibration errors.

Tests of whether two models differ on the same samples are McNemar's exact test and the sign-flip permutation test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import scipy  # type: ignore[import-untyped]

from pipeline.statistics.aggregates import Floats

RESAMPLES = 10_000  # permutations of a test
_CHUNK_BYTES = 1 << 21  # of random bits at a time
_MAX_DISTINCT = 64
_SEED = 0  # fixed, so that the verdict cannot be changed by trying seeds


@dataclass(frozen=True)
class McNemar:
    p_value: float
    only_candidate: int  # samples that only the candidate gets right
    only_baseline: int


def mcnemar(candidate: Floats, baseline: Floats) -> McNemar | None:
    """Return McNemar's exact test; None unless all values are 1 (right) or 0 (wrong)."""
    if not all(np.isin(values, (0.0, 1.0)).all() for values in (candidate, baseline)):
        return None
    only_candidate = int(((candidate == 1) & (baseline == 0)).sum())
    only_baseline = int(((candidate == 0) & (baseline == 1)).sum())
    return McNemar(binomial_two_sided_p_value(only_candidate, only_baseline), only_candidate, only_baseline)


def binomial_two_sided_p_value(a: int, b: int) -> float:
    """Return the probability of a split at least as uneven as a : b if both sides are equally likely."""
    return min(1.0, 2 * float(scipy.special.bdtr(min(a, b), a + b, 0.5)))


def binomial_upper_p_value(count: int, total: int) -> float:
    """Return the probability of `count` or more successes in `total` fair coin flips."""
    return float(scipy.special.bdtrc(count - 1, total, 0.5)) if count > 0 else 1.0


def decrease_p_value(difference: Floats, resamples: int = RESAMPLES) -> float:
    """Return the one-sided p-value of a decrease in the sign-flip test.

    Exact if all differences have one size; otherwise from random signs, where the observed signs count as one draw.
    """
    sizes, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    if len(sizes) == 1:
        return binomial_upper_p_value(int((difference < 0).sum()), int(counts[0]))
    sums, slack = _sign_flips(difference, sizes, counts, resamples)
    return (1 + int((sums <= float(difference.sum()) + slack).sum())) / (1 + resamples)


def permutation_p_value(difference: Floats, resamples: int = RESAMPLES) -> float:
    """Return the two-sided p-value of the sign-flip permutation test: swapping the models per sample changes nothing.

    The observed signs count as one draw, so that the value is never 0 and the test keeps its level.
    """
    sizes, counts = np.unique(np.abs(difference[difference != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    sums, slack = _sign_flips(difference, sizes, counts, resamples)
    return (1 + int((np.abs(sums) >= abs(float(difference.sum())) - slack).sum())) / (1 + resamples)


def _sign_flips(
    difference: Floats, sizes: Floats, counts: np.ndarray[tuple[int], np.dtype[np.int64]], resamples: int
) -> tuple[Floats, float]:
    """Return sums of the differences with random signs, and by how much the order of adding may change a sum."""
    generator, slack = np.random.default_rng(_SEED), 1e-9 * float(np.abs(difference).sum())
    if len(sizes) > _MAX_DISTINCT:
        return _sign_flip_sums(difference, resamples, generator), slack
    # The number of flipped signs among samples with equal differences is binomial.
    flipped = generator.binomial(counts, 0.5, size=(resamples, len(counts)))
    return (counts - 2 * flipped) @ sizes, slack


def _sign_flip_sums(difference: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    """Draw a bit per sample: twice the sum of those that keep their sign, minus the sum of all."""
    width = (len(difference) + 7) // 8
    padded = np.zeros(8 * width)
    padded[: len(difference)] = difference
    tables = _sums_by_byte(padded.reshape(width, 8))
    rows = max(1, _CHUNK_BYTES // width)
    sums_of_kept = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        bits = np.frombuffer(generator.bytes(size * width), np.uint8).reshape(size, width)
        sums_of_kept.append(tables[np.arange(width), bits].sum(axis=1))
    sums: Floats = 2 * np.concatenate(sums_of_kept) - difference.sum()
    return sums


def _sums_by_byte(groups: Floats) -> Floats:
    """Return for every eight samples their sum under each of 256 sign choices: one look-up replaces eight additions."""
    choices = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float64)
    sums: Floats = groups @ choices.T
    return sums


_POWER = 0.8
_NORMAL = NormalDist()


def detectable_difference(difference: Floats, confidence: float, power: float = _POWER) -> float:
    """Return the true mean difference that test sets of this size detect with the given power.

    Uses the normal approximation with the measured variance. If no sample differs, the variance is that of the largest
    fraction of differing samples that a test set of this size could miss entirely, at the same confidence.
    """
    count = len(difference)
    if count < 2:
        return math.inf
    deviation = float(np.std(difference, ddof=1))
    if deviation == 0.0:
        missed_fraction = 1 - (1 - confidence) ** (1 / count)
        deviation = math.sqrt(missed_fraction)  # differences of ±1 on that share of samples
    return (_NORMAL.inv_cdf((1 + confidence) / 2) + _NORMAL.inv_cdf(power)) * deviation / math.sqrt(count)


_MOST_WORST = 3  # samples: with more large errors than these, their frequency is known well enough


def worst_losses(difference: Floats, differing: int) -> tuple[int, float]:
    """Return the number of largest losses, a hundredth of the samples that differ, and their share of the variance."""
    count = max(1, min(differing // 100, _MOST_WORST))
    lifts = difference - difference.mean()
    largest, total = np.sort(np.minimum(lifts, 0.0))[:count], float((lifts**2).sum())
    return count, float((largest**2).sum()) / total if total else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values with Holm's step-down correction, which keeps the family-wise error rate."""
    order = np.argsort(p_values, kind="stable")
    count, running, adjusted = len(p_values), 0.0, [0.0] * len(p_values)
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def bonferroni_confidence(confidence: float, comparisons: int) -> float:
    """Return the confidence of each interval with which all of them hold at once (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, comparisons)


def repeated_confidence(confidence: float, number: int) -> float:
    """Return the confidence of the interval of the k-th comparison on one test set.

    Its share of the error probability 1 - confidence is 2 / (k (k + 1)): all of it at first, then 1/3, 1/6, 1/10. The
    shares of any number of comparisons add up to less than 2, so all intervals hold at once with a probability of at
    least 1 - 2 (1 - confidence), if no candidate was chosen by its results on this test set.
    """
    return confidence if number == 1 else 1 - (1 - confidence) * 2 / (number * (number + 1))


def confidence_text(confidence: float) -> str:
    """Return a confidence as a percentage with two digits of the error probability, as in 95% and 99.17%."""
    decimals = max(0, 1 - math.floor(math.log10(100 * (1 - confidence))))
    text = f"{100 * confidence:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


_BINS = 15


@dataclass(frozen=True)
class Bin:
    """One bin of a calibration curve: answers with a similar stated confidence."""

    low: float
    high: float
    samples: int
    confidence: float  # mean stated confidence
    accuracy: float  # fraction that is right


def brier_scores(probabilities: Floats, actual: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """Return per sample the squared distance of the probabilities from the label; 0 is perfect, 2 the worst."""
    of_label = probabilities[np.arange(len(actual)), actual]
    scores: Floats = (probabilities**2).sum(axis=1) - 2 * of_label + 1
    return scores


def confidences_and_hits(probabilities: Floats, actual: np.ndarray[Any, Any]) -> tuple[Floats, Floats]:
    """Return the probability of the likeliest class, and 1 where that class is the true one."""
    wide = probabilities.astype(np.float64)
    return np.minimum(wide.max(axis=1), 1.0), (wide.argmax(axis=1) == actual).astype(np.float64)


def calibration_curve(confidences: Floats, is_right: Floats, bins: int = _BINS) -> tuple[Bin, ...]:
    """Return bins of equal width over [0, 1]; empty ones are left out."""
    bin_index = np.minimum((confidences * bins).astype(np.int64), bins - 1)
    samples = np.bincount(bin_index, minlength=bins)
    confidence = np.bincount(bin_index, weights=confidences, minlength=bins)
    hits = np.bincount(bin_index, weights=is_right, minlength=bins)
    return tuple(
        Bin(i / bins, (i + 1) / bins, int(n), float(confidence[i] / n), float(hits[i] / n))
        for i, n in enumerate(samples)
        if n
    )


def expected_calibration_error(bins: tuple[Bin, ...]) -> float:
    """Return the mean gap between stated confidence and accuracy, weighted by samples (ECE)."""
    total = sum(bin_.samples for bin_ in bins)
    return sum(bin_.samples * abs(bin_.confidence - bin_.accuracy) for bin_ in bins) / total
