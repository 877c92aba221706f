"""The next token from a row of logits: the likeliest, or drawn; and how likely the model found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sampling:
    """In OpenAI's words; `top_k` is what other servers have beside them. Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: any of them

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True)
class Likelihood:
    """How likely the model found a token, and the likeliest in its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose(logits: Array, sampling: Sampling, draw: Callable[[], float]) -> int:
    """One row of the vocabulary. Each sequence has its own `draw`, from 0 to 1: company changes nothing."""
    if sampling.greedy:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a temperature next to 0 leaves nothing but the likeliest
        scaled /= sampling.temperature
    known = None
    if 0 < sampling.top_k < len(scaled):
        known = np.sort(np.argpartition(-scaled, sampling.top_k - 1)[: sampling.top_k])
        scaled = scaled[known]
    shares = np.exp(scaled)
    shares /= shares.sum()
    kept = nucleus(shares, sampling.top_p)
    if kept is not None:
        shares = shares[kept]
        known = kept if known is None else known[kept]
    place = drawn(shares, draw())
    return place if known is None else int(known[place])


def nucleus(shares: Array, top_p: float) -> Array | None:
    """The fewest tokens that have this share together, in the order of their ids; None for all of them."""
    if top_p >= 1:
        return None
    # Those below this share are together less than what may be left out: only the others need to be put in order.
    likely = np.flatnonzero(shares >= (1 - top_p) / len(shares))
    order = likely[np.argsort(-shares[likely], kind="stable")]
    count = int(np.searchsorted(np.cumsum(shares[order]), top_p)) + 1
    return np.sort(order[:count])


def drawn(shares: Array, number: float) -> int:
    """The place in which a number from 0 to 1 falls; never one without a share."""
    sums = np.cumsum(shares)
    place = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(shares)[-1]))


def log_softmax(logits: Array) -> Array:
    """Along the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def likelihood(logits: Array, token: int, top: int) -> Likelihood:
    """By the model alone: before temperature and all that follows it."""
    logprobs = log_softmax(logits)
    return Likelihood(token, float(logprobs[token]), likeliest(logprobs, top))


def likeliest(logprobs: Array, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    count = min(count, len(logprobs))
    found: Sequence[int] = np.argpartition(-logprobs, count - 1)[:count].tolist()
    return tuple(sorted(((one, float(logprobs[one])) for one in found), key=lambda pair: (-pair[1], pair[0])))
