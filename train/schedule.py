"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(step: int, total: int, peak: float, warmup: float, kind: Literal["cosine", "constant"]) -> float:
    """Linear from zero over the first `warmup` share of all steps, then constant or a half cosine towards zero."""
    rising = round(total * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    if kind == "constant":
        return peak
    return peak * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising))) / 2
