"""The perplexity of a variant of a language model, and how much it increases over that of the verified file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from export.compare import Array
from pipeline.contract.settings.stages import Cost
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.intervals import Interval, metric_interval

PERPLEXITY_INCREASE = 0.01  # largest, relative to the verified file, unless export.budget has another


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of the test texts, or of the tokens that their `labels` do not ignore.

    `increase` is relative to the verified file's, over the same tokens.
    """

    value: float
    reference: float
    increase: Interval | None  # None: there are too few texts to estimate it

    def __str__(self) -> str:
        change = "" if self.increase is None else f", {_percent(self.increase)} than fp32"
        return f"perplexity {self.value:#.4g}{change}"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def faults(self, budget: Mapping[Cost, float]) -> Iterator[str]:
        """Yield a sentence if the increase may be above its limit."""
        limit = budget.get("perplexity", PERPLEXITY_INCREASE)
        if self.increase is None:
            yield "perplexity differs in too few test texts to estimate how much it increases"
        elif not self.increase.high <= limit:
            yield (
                f"{self} ({self.increase.low:+.2%} to {self.increase.high:+.2%}), over export.budget "
                f"perplexity={limit:g}"
            )


def token_losses(logits: Array, ids: Array, segments: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the negative log-likelihood of the chosen tokens that are not the first of a text, and which these are."""
    is_counted = (segments[:, 1:] == segments[:, :-1]) & chosen[:, 1:]
    scores = torch.from_numpy(logits[:, :-1]).float().log_softmax(-1)
    likelihoods = scores.gather(-1, torch.from_numpy(ids[:, 1:, None]))[..., 0].double().numpy()
    return np.where(is_counted, -likelihoods, 0.0), is_counted


def relative_increase(losses: Array, reference: Array, tokens: Array, confidence: float) -> Interval | None:
    """Return the relative increase of perplexity, paired by sample: samples count by their tokens."""
    differences = (losses - reference) / max(tokens.mean(), 1e-9)
    if not differences.any():
        return Interval(0.0, 0.0, 0.0)
    if (interval := metric_interval(Mean(differences), confidence)) is None:
        return None
    return Interval(*(float(np.expm1(value)) for value in (interval.estimate, interval.low, interval.high)))


def _percent(increase: Interval) -> str:
    return f"{abs(increase.estimate):.2%} {'higher' if increase.estimate >= 0 else 'lower'}"
