"""One text that is being written: its prompt, what was chosen so far, and when it ends; and who asked for it.

Stop words in a text that comes in pieces: found across them, and never shown, not even in part.

Tokens into text one by one, without ever showing a part of a character: many tokens are bytes of one.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from serve.errors import Expired
from serve.generate.sampling import Likelihood, Sampling, choose, likeliest, likelihood, log_softmax
from serve.request_context import Watch
from serve.runtime.batcher import stays

Array = np.ndarray[Any, Any]
Finish = Literal["", "stop", "length"]

_TICK_SECONDS = 1e-3  # the loop's timers may be early by less than it


@dataclass(frozen=True)
class Piece:
    """What came of one token, or of the prompt."""

    index: int  # of the sequence in its request
    text: str = ""
    told: tuple[Likelihood | int, ...] = ()  # of each token whose likelihood was asked for; an id where there is none
    finish: Finish = ""
    tokens: int = 0


@dataclass(frozen=True)
class Order:
    """How each sequence of a request is to be written."""

    most: int  # tokens
    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top: int | None = None  # likeliest tokens told beside each; None: nothing is told
    echo: bool = False  # begin with the prompt, and tell of it what is told of the answer


@dataclass(eq=False)
class Asking:
    """A request whose texts are being written; belongs to the event loop, but for `over`, which threads read."""

    order: Order
    deadline: float = math.inf  # of time.monotonic
    gone: Callable[[], bool] = stays
    watch: Watch = field(default_factory=Watch)
    whole: bool = False  # nobody looks at a text before all of them have ended
    left: int = 0  # texts that have not
    over: bool = False  # nobody waits any more
    _pieces: list[Piece] = field(default_factory=list)
    _error: Exception | None = None
    _bell: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.left -= bool(piece.finish)
        if not self.whole or not self.left:
            self._bell.set()

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.over, self._error = True, error
            self._bell.set()

    async def next(self) -> list[Piece]:
        """What has come since; at the deadline, whatever runs then, that it is past."""
        delay = None
        if self.deadline < math.inf:
            delay = max(0.0, self.deadline - time.monotonic()) + _TICK_SECONDS
        try:
            async with asyncio.timeout(delay):  # wait_for would make a task of it
                await self._bell.wait()
        except TimeoutError:
            raise Expired("the deadline passed before the text was written") from None
        if self._error is None:
            self._bell.clear()
        elif self.whole or not self._pieces:
            raise self._error
        pieces, self._pieces = self._pieces, []
        return pieces


class Writing:
    """One row of the batch. Whoever runs the model has it to himself: first the loop, then one thread at a time."""

    def __init__(self, asking: Asking, index: int, prompt: Sequence[int], end: Sequence[int], decode: Decode) -> None:
        order = asking.order
        self.asking, self.index, self.prompt = asking, index, tuple(prompt)
        self.last = 0  # token chosen, which the model has not seen yet
        self.count = 0  # of tokens chosen
        self.ended = False
        self.since = 0.0  # when its last token came
        self._end = frozenset(end)
        self._decode, self._text = decode, Detokenizer(decode, prompt)
        self._stops = Stops(order.stop)

    @functools.cached_property
    def _random(self) -> np.random.Generator:
        """Made by whoever draws: to ask the system for chance takes time, and the likeliest token needs none."""
        seed = self.asking.order.seed
        return np.random.default_rng(None if seed is None else [seed, self.index])

    def _draw(self) -> float:
        return self._random.random()

    @property
    def most_positions(self) -> int:
        return len(self.prompt) + self.asking.order.most

    def introduce(self, told: Sequence[Likelihood | int]) -> Piece | None:
        """The prompt, where it is to be shown."""
        order = self.asking.order
        self.ended = order.most == 0
        finish: Finish = "length" if self.ended else ""
        text = self._decode(self.prompt) if order.echo else ""
        return Piece(self.index, text, tuple(told), finish) if order.echo or finish else None

    def extend(self, logits: Array) -> Piece:
        """Choose the next token; raises where the model gave no number to choose by."""
        if not np.isfinite(logits.max()):  # NaN is passed on by max
            raise ArithmeticError("the model gave NaN or infinite logits")
        order = self.asking.order
        token = choose(logits, order.sampling, self._draw)
        told = () if order.top is None else (likelihood(logits, token, order.top),)
        self.last, self.count = token, self.count + 1
        text, finish = self._shown(token)
        self.ended = bool(finish)
        return Piece(self.index, text, told, finish, tokens=1)

    def _shown(self, token: int) -> tuple[str, Finish]:
        """What can be shown now, all of it where this token is the last."""
        end = token in self._end
        text, stopped = self._stops.feed("" if end else self._text.feed(token))
        if not stopped and (end or self.count >= self.asking.order.most):
            rest, stopped = self._stops.feed(self._text.end())
            text += rest if stopped else rest + self._stops.end()
            return text, "stop" if end or stopped else "length"
        return text, "stop" if stopped else ""


def prompt_likelihoods(logits: Array, following: Sequence[int], top: int) -> list[Likelihood | int]:
    """Of the prompt's own tokens, each by the logits of the one before it."""
    logprobs = log_softmax(logits)
    return [
        Likelihood(token, float(row[token]), likeliest(row, top))
        for row, token in zip(logprobs, following, strict=True)
    ]


class Stops:
    """What may be the beginning of a stop word is held back until the next piece tells."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What can be shown by now, and whether a stop word ended the text."""
        if not self._words:
            return text, False
        text = self._held + text
        places = [place for word in self._words if (place := text.find(word)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max(beginning(text, word) for word in self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def end(self) -> str:
        """No more comes: what was held back was no stop word."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, word: str) -> int:
    """How many of the text's last characters are the first of a word, which is not in it whole."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)


Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"  # what decoders put in the place of bytes that are no character, or not yet
_CONTEXT = 6  # tokens before the answer: decoders drop a space at the beginning of a text
_LONGEST = 8  # tokens that may be held back: no character needs more, so what still is none never becomes one


class Detokenizer:
    """A token's text depends on its neighbours, so the last ones are decoded again, with it and without."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: the prompt."""
        context = list(before[-_CONTEXT:])
        if decode(context).endswith(_BROKEN):  # its own last character is not whole
            context = []
        self._decode, self._ids = decode, context
        self._known = len(context)  # the text of the tokens up to here was given

    def feed(self, token: int) -> str:
        """The text that is certain now; often none."""
        self._ids.append(token)
        text = self._fresh()
        if not text or (text.endswith(_BROKEN) and len(self._ids) - self._known < _LONGEST):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text

    def end(self) -> str:
        """Nothing follows: what was held back, whatever it is."""
        text = self._fresh()
        self._known = len(self._ids)
        return text

    def _fresh(self) -> str:
        before = self._decode(self._ids[: self._known])
        return self._decode(self._ids)[len(before) :]
