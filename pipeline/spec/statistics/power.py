"""What a test set can see at all: the smallest true difference that it would show, and corrections for many looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from pipeline.spec.statistics.interval import Floats

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
