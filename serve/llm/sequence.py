"""Sequences that are being generated: one for each requested text, grouped by request.

A sequence turns its tokens into text. Parts of a character, and text that may be the beginning of a stop string, are
held back until the next tokens decide.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipeline.contract.codec import Array
from serve.errors import DeadlineExceeded
from serve.llm.sampling import Sampling, TokenLogprob, log_softmax, sample_token, token_logprob, top_logprobs
from serve.request_context import RequestContext

Decode = Callable[[Sequence[int]], str]
FinishReason = Literal["", "stop", "length"]  # "": not finished
Logprobs = Sequence[TokenLogprob | int]  # a token id where the log probability is unknown: the first token of a prompt

_TICK_SECONDS = 1e-3  # timers of the event loop may fire early by less than it
_REPLACEMENT = "\ufffd"  # what decoders return for bytes that are not, or not yet, a character
_CONTEXT_TOKENS = 6  # decoded before the answer: decoders drop a space at the beginning of a text
_MAX_PENDING_TOKENS = 8  # no character needs more tokens, so these never become one


@dataclass(frozen=True)
class Chunk:
    """The result of one token, or of the prompt."""

    index: int  # of the sequence in its group
    text: str = ""
    logprobs: tuple[TokenLogprob | int, ...] = ()
    finish_reason: FinishReason = ""
    tokens: int = 0


@dataclass(frozen=True)
class GenerationOptions:
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end the text like the model's own
    seed: int | None = None
    top_logprobs: int | None = None  # alternatives reported with each token; None: no log probabilities
    echo: bool = False  # return the prompt before the answer, with its log probabilities


@dataclass(eq=False)
class SequenceGroup:
    """The sequences of one request. Belongs to the event loop, except for `closed`, which threads read."""

    options: GenerationOptions
    request: RequestContext = field(default_factory=lambda: RequestContext({}, ""))
    buffered: bool = False  # the client gets nothing before all sequences are finished
    unfinished: int = 0
    closed: bool = False  # nothing reads the chunks any more
    _chunks: list[Chunk] = field(default_factory=list)
    _error: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.unfinished -= bool(chunk.finish_reason)
        if not self.buffered or not self.unfinished:
            self._changed.set()

    def fail(self, error: Exception) -> None:
        if not self.closed:
            self.closed, self._error = True, error
            self._changed.set()

    async def next_chunks(self) -> list[Chunk]:
        """Wait for new chunks; raises DeadlineExceeded at the deadline, even during a run of the model."""
        delay = None
        if self.request.deadline < math.inf:
            delay = max(0.0, self.request.deadline - time.monotonic()) + _TICK_SECONDS
        try:
            async with asyncio.timeout(delay):  # unlike wait_for it needs no task
                await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the text was complete") from None
        if self._error is None:
            self._changed.clear()
        elif self.buffered or not self._chunks:
            raise self._error
        chunks, self._chunks = self._chunks, []
        return chunks


class TextSequence:
    """One row of the batch. Used by one thread at a time: the event loop's first, then those of the pool."""

    def __init__(
        self, group: SequenceGroup, index: int, prompt: Sequence[int], end: Sequence[int], decode: Decode
    ) -> None:
        self.group, self.index, self.prompt = group, index, tuple(prompt)
        self.tokens = list(prompt)  # and those generated; the last one is not yet an input of the model
        self.arrival = self.preemptions = 0  # number of the sequence, and how often it had to give its memory back
        self.cached_tokens = 0  # of the prompt, which were not computed again
        self.finished = self.failed = False
        self.last_token_at = 0.0
        self._end = frozenset(end)
        self._decode, self._detokenizer = decode, Detokenizer(decode, prompt)
        self._stop = StopStrings(group.options.stop)

    @functools.cached_property
    def _random(self) -> np.random.Generator:
        """Created on first use: seeding from the system is slow, and greedy decoding needs no numbers."""
        seed = self.group.options.seed
        return np.random.default_rng(None if seed is None else [seed, self.index])

    def _draw(self) -> float:
        return self._random.random()

    @property
    def is_active(self) -> bool:
        return not self.finished and not self.group.closed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def max_positions(self) -> int:
        return len(self.prompt) + self.group.options.max_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Return whether the log probabilities of the prompt are requested, and not computed yet."""
        options = self.group.options
        return options.echo and options.top_logprobs is not None and not self.generated

    def echo_prompt(self, logprobs: Logprobs) -> Chunk | None:
        """Return the prompt where the request echoes it, or the end of a sequence without tokens to generate."""
        options = self.group.options
        self.finished = options.max_tokens == 0
        reason: FinishReason = "length" if self.finished else ""
        text = self._decode(self.prompt) if options.echo else ""
        return Chunk(self.index, text, tuple(logprobs), reason) if options.echo or reason else None

    def extend(self, logits: Array) -> Chunk:
        """Choose the next token."""
        if not np.isfinite(logits.max()):  # max returns NaN if there is one
            raise ArithmeticError("the model returned NaN or infinite logits")
        options = self.group.options
        token = sample_token(logits, options.sampling, self._draw, self.tokens)
        logprobs = () if options.top_logprobs is None else (token_logprob(logits, token, options.top_logprobs),)
        self.tokens.append(token)
        text, reason = self._new_text(token)
        self.finished = bool(reason)
        return Chunk(self.index, text, logprobs, reason, tokens=1)

    def _new_text(self, token: int) -> tuple[str, FinishReason]:
        """Return the text that is certain now, which is all of it at the last token."""
        end = token in self._end
        text, stopped = self._stop.feed("" if end else self._detokenizer.feed(token))
        if not stopped and (end or self.generated >= self.group.options.max_tokens):
            rest, stopped = self._stop.feed(self._detokenizer.flush())
            text += rest if stopped else rest + self._stop.flush()
            return text, "stop" if end or stopped else "length"
        return text, "stop" if stopped else ""


def prompt_logprobs(logits: Array, next_tokens: Sequence[int], top: int) -> list[TokenLogprob | int]:
    """Return the log probability of each token of a prompt, by the logits of the token before it."""
    logprobs = log_softmax(logits)
    return [
        TokenLogprob(token, float(row[token]), top_logprobs(row, top))
        for row, token in zip(logprobs, next_tokens, strict=True)
    ]


class StopStrings:
    """Ends a text at the first stop string, which may arrive in several pieces and is never shown."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._pending = ""  # may be the beginning of a stop string

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown, and whether a stop string ended it."""
        if not self._strings:
            return text, False
        text = self._pending + text
        matches = [position for stop in self._strings if (position := text.find(stop)) >= 0]
        if matches:
            self._pending = ""
            return text[: min(matches)], True
        keep = max(partial_match(text, stop) for stop in self._strings)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        pending, self._pending = self._pending, ""
        return pending


def partial_match(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Detokenizer:
    """Decodes tokens one by one. A token's text depends on its neighbours, so the last tokens are decoded again."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        context = list(prompt[-_CONTEXT_TOKENS:])
        if decode(context).endswith(_REPLACEMENT):  # the prompt ends within a character
            context = []
        self._decode, self._ids = decode, context
        self._emitted = len(context)  # tokens whose text was returned

    def feed(self, token: int) -> str:
        """Return the text that is certain now, which is often empty."""
        self._ids.append(token)
        text = self._pending_text()
        if not text or (text.endswith(_REPLACEMENT) and len(self._ids) - self._emitted < _MAX_PENDING_TOKENS):
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._pending_text()
        self._emitted = len(self._ids)
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._ids[: self._emitted])
        return self._decode(self._ids)[len(before) :]
