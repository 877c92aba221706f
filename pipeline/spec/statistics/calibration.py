"""Whether stated probabilities are true: Brier score and expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.spec.statistics.interval import Floats

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
