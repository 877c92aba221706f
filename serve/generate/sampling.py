"""Choose the next token from a row of logits (greedy, temperature, top-k, top-p), and its log probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sampling:
    """OpenAI's parameters, and the widely used `top_k`. Temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a token, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample_token(logits: Array, sampling: Sampling, draw: Callable[[], float]) -> int:
    """Choose a token. `draw` returns a number from 0 to 1; each sequence has its own, whatever runs beside it."""
    if sampling.greedy:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a temperature close to 0 leaves only the most likely token
        scaled /= sampling.temperature
    tokens = None  # the tokens that are left; None for all
    if 0 < sampling.top_k < len(scaled):
        tokens = np.sort(np.argpartition(-scaled, sampling.top_k - 1)[: sampling.top_k])
        scaled = scaled[tokens]
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    kept = nucleus(probabilities, sampling.top_p)
    if kept is not None:
        probabilities = probabilities[kept]
        tokens = kept if tokens is None else tokens[kept]
    index = pick(probabilities, draw())
    return index if tokens is None else int(tokens[index])


def nucleus(probabilities: Array, top_p: float) -> Array | None:
    """Return the smallest set of tokens with probability `top_p`, by id; None for all tokens."""
    if top_p >= 1:
        return None
    # Tokens below this probability sum to less than 1 - top_p, so only the others need to be sorted.
    likely = np.flatnonzero(probabilities >= (1 - top_p) / len(probabilities))
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    return np.sort(order[:count])


def pick(probabilities: Array, number: float) -> int:
    """Return the index at which the cumulative probability exceeds `number`; never one with probability 0."""
    sums = np.cumsum(probabilities)
    index = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities)[-1]))


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logits: Array, token: int, top: int) -> TokenLogprob:
    """Return the model's own log probability, before temperature and other sampling parameters."""
    logprobs = log_softmax(logits)
    return TokenLogprob(token, float(logprobs[token]), top_logprobs(logprobs, top))


def top_logprobs(logprobs: Array, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    count = min(count, len(logprobs))
    tokens: Sequence[int] = np.argpartition(-logprobs, count - 1)[:count].tolist()
    return tuple(sorted(((token, float(logprobs[token])) for token in tokens), key=lambda pair: (-pair[1], pair[0])))
