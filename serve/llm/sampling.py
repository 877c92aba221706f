"""Choose the next token from a row of logits, as the logits processors of transformers do, and its log probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.contract.codec import Array


@dataclass(frozen=True)
class Sampling:
    """OpenAI's parameters, and those of transformers and vLLM. Temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # smallest probability, as a part of the largest
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a token, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample_token(logits: Array, sampling: Sampling, draw: Callable[[], float], context: Sequence[int] = ()) -> int:
    """Choose a token. `draw` returns a number from 0 to 1; each sequence has its own, whatever runs beside it.

    `context`: the tokens of the prompt and those generated, which the repetition penalty makes less likely.
    """
    adjusted = adjust_logits(logits, sampling, context)
    if sampling.greedy:
        return int(adjusted.argmax())
    tokens, probabilities = token_probabilities(adjusted, sampling)
    index = pick(probabilities, draw())
    return index if tokens is None else int(tokens[index])


def adjust_logits(logits: Array, sampling: Sampling, context: Sequence[int]) -> Array:
    """Add the biases, then divide logits of tokens in the context by the penalty, or multiply negative ones."""
    if not sampling.logit_bias and sampling.repetition_penalty == 1:
        return logits
    adjusted = logits.astype(np.float64)
    if sampling.logit_bias:
        adjusted[list(sampling.logit_bias)] += list(sampling.logit_bias.values())
    if sampling.repetition_penalty != 1 and context:
        repeated = np.array(context)
        values, penalty = adjusted[repeated], sampling.repetition_penalty
        adjusted[repeated] = np.where(values < 0, values * penalty, values / penalty)
    return adjusted


def token_probabilities(logits: Array, sampling: Sampling) -> tuple[Array | None, Array]:
    """Return the tokens that temperature, top-k, top-p and min-p leave, None for all, and their probabilities."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a temperature close to 0 leaves only the most likely token
        scaled /= sampling.temperature
    tokens = None
    if 0 < sampling.top_k < len(scaled):
        tokens = np.flatnonzero(scaled >= np.partition(scaled, -sampling.top_k)[-sampling.top_k])
        scaled = scaled[tokens]
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    for limit, value in ((nucleus, sampling.top_p), (above_min_p, sampling.min_p)):
        kept = limit(probabilities, value)
        if kept is not None:
            probabilities = probabilities[kept]
            tokens = kept if tokens is None else tokens[kept]
    return tokens, probabilities / probabilities.sum()


def nucleus(probabilities: Array, top_p: float) -> Array | None:
    """Return the smallest set of tokens with probability `top_p`, by id; None for all tokens."""
    if top_p >= 1:
        return None
    # Tokens below this probability sum to less than 1 - top_p, so only the others need to be sorted.
    likely = np.flatnonzero(probabilities >= (1 - top_p) / len(probabilities))
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    return np.sort(order[:count])


def above_min_p(probabilities: Array, min_p: float) -> Array | None:
    """Return the tokens with at least this part of the largest probability; None for all tokens."""
    return np.flatnonzero(probabilities >= min_p * probabilities.max()) if min_p > 0 else None


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
