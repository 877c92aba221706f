"""The loop of a language model: lets in who waits as far as memory goes, has the batch run, hands out what is made.

The continuous batch: who writes joins between two tokens and leaves at once; every step runs in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.errors import InvalidPayload
from serve.errors import Busy, Expired, Gone
from serve.generate.kv_cache import Block, Graph, Room
from serve.generate.prefill import Prefill, together
from serve.generate.sequence import Piece, Writing
from serve.metrics import Meter

Made = list[tuple[Writing, Piece | Exception]]


@dataclass
class Batch:
    """The rows of `block` belong to `writings`, in their order."""

    graph: Graph
    block: Block | None = None
    writings: tuple[Writing, ...] = ()

    def step(self) -> Made:
        """One more token for everybody who has not ended."""
        self._settle()
        if not self.writings or self.block is None:
            return []
        ids = np.array([[one.last] for one in self.writings], np.int64)
        try:
            logits, self.block = self.graph.run(self.block, ids)
        except Exception as error:  # memory, or a model that fails: nothing is known of anybody's cache now
            failed, self.block, self.writings = self.writings, None, ()
            return [(one, error) for one in failed]
        return [_extended(one, row) for one, row in zip(self.writings, logits[:, -1], strict=True)]

    def read(self, prefill: Prefill, tokens: int) -> Made:
        """A part of the prompts; with the last one they have their first token and are of the batch."""
        try:
            prefill.advance(tokens)
        except Exception as error:  # as above, for those alone
            return [(one, error) for one in prefill.writings]
        if not prefill.done:
            return []
        made: Made = []
        for one in prefill.writings:
            if (piece := one.introduce(prefill.told(one))) is not None:
                made.append((one, piece))
            if not one.ended:
                made.append(_extended(one, prefill.first(one)))
        self._join(prefill)
        return made

    def _settle(self) -> None:
        """Let go of those who have ended; of the others nothing is copied if there are none."""
        staying = [row for row, one in enumerate(self.writings) if _stays(one)]
        if len(staying) == len(self.writings):
            return
        self.writings = tuple(self.writings[row] for row in staying)
        self.block = self.graph.gathered([(self.block, staying)]) if staying and self.block else None

    def _join(self, prefill: Prefill) -> None:
        coming = [one for one in prefill.writings if _stays(one)]
        staying = [row for row, one in enumerate(self.writings) if _stays(one)]
        parts: list[Any] = [(self.block, staying)] if staying else []
        if coming:
            parts.append((prefill.block, prefill.rows(coming)))
        self.writings = (*(self.writings[row] for row in staying), *coming)
        if len(parts) == 1 and not staying and prefill.rows(coming) == list(range(prefill.block.rows)):
            self.block = prefill.block  # they are all there is, as they are
        else:
            self.block = self.graph.gathered(parts) if parts else None


def _stays(writing: Writing) -> bool:
    return not writing.ended and not writing.asking.over


def _extended(writing: Writing, logits: Any) -> tuple[Writing, Piece | Exception]:
    if writing.asking.over:
        return writing, Piece(writing.index)
    try:
        return writing, writing.extend(logits)
    except Exception as error:  # of one sequence alone
        writing.ended = True
        return writing, error


_TOGETHER = 2048  # tokens of prompts that are read as one batch: who comes next waits for all of them
_KEPT = 0.8  # of what is known of how long a text takes, with each that ends

# Tokens in a row, and for how long at most, while nobody waits to be let in: the way to the loop and back takes as long
# as a small model's part of a step. Other models may wait for the thread, and the loop looks who has left.
_IN_A_ROW, _IN_A_ROW_SECONDS = 8, 0.05

Turn = list[tuple[float, Made]]  # what each step made, and when

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    rows: int  # most texts that are written at once
    waiting: int  # most requests that wait
    cache_bytes: int  # for the keys and values of all of them
    read_at_once: int = 512  # tokens of prompts in one run where nobody else waits for the model
    read_between: int = 128  # and between two tokens of those who write

    def tokens(self, reading: int, writing: int) -> int:
        """Of prompts in one run: one text that writes does not hold up many that would."""
        return min(self.read_at_once, self.read_between * max(1, reading // writing)) if writing else self.read_at_once


class Engine:
    """Belongs to one event loop; the model runs in `pool`, one step after the other."""

    def __init__(self, graph: Graph, rules: Rules, pool: Executor, meter: Meter | None = None) -> None:
        self.rules, self.room, self.meter = rules, Room(graph.position_bytes, rules.cache_bytes), meter or Meter()
        self._graph, self._pool, self._batch = graph, pool, Batch(graph)
        self._waiting: deque[Writing] = deque()
        self._prefill: Prefill | None = None
        self._task: asyncio.Task[None] | None = None
        self._text_seconds = 0.0  # that a text took of late

    @property
    def running(self) -> int:
        return len(self._inside())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """That are spoken for."""
        return self._bytes(self._inside())

    @property
    def longest(self) -> int:
        """Positions that one text may have, as far as memory goes."""
        return self.rules.cache_bytes // max(1, self.room.bytes(1, 1))

    def admit(self, writings: int, deadline: float) -> None:
        """Refuse at once what has no room."""
        if time.monotonic() >= deadline:
            raise Expired("the deadline passed before the first token")
        free = max(0, self.rules.rows - self.running)  # who comes in the same moment waits for nobody
        if len({one.asking for one in self._waiting}) >= self.rules.waiting + free:
            raise Busy(
                f"{self.waiting} texts wait already for the memory or the time to be written; try again in a moment",
                self._text_seconds * (1 + (self.waiting + writings) / self.rules.rows),
            )

    def check(self, positions: int) -> None:
        """A text that never fits is not waited with."""
        if not self.room.fits(1, positions):
            raise InvalidPayload(
                f"prompt and answer may take {positions} positions; the service has memory for {self.longest} "
                "of one text; ask for fewer tokens (max_tokens)"
            )

    async def written(self, writings: Sequence[Writing]) -> AsyncGenerator[Piece, None]:
        """The pieces of all texts of one request, as they come. Whoever stops listening takes them out of the batch."""
        asking = writings[0].asking
        self.admit(len(writings), asking.deadline)
        self._waiting.extend(writings)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        asking.left = left = len(writings)
        try:
            while left:
                for piece in await asking.next():
                    left -= bool(piece.finish)
                    yield piece
        finally:
            asking.over = True

    async def _work(self) -> None:
        """Until nobody wants anything any more."""
        try:
            while self._sweep():
                self._let_in()
                if self._batch.writings:
                    await self._run(functools.partial(self._write, self._batch, asyncio.get_running_loop()))
                if self._prefill is not None:
                    await self._read(self._prefill)
        except Exception as error:  # a bug of ours: nobody may wait for ever for it
            log.exception("the loop that writes texts failed")
            self._end(error)
        except asyncio.CancelledError:
            self._end(Busy("the service ends; ask again"))
            raise
        finally:
            self._task = None

    def _end(self, error: Exception) -> None:
        """For everybody; whoever asks next begins anew."""
        for one in (*self._inside(), *self._waiting):
            one.asking.fail(error)
        self._batch, self._prefill = Batch(self._graph), None

    async def _read(self, prefill: Prefill) -> None:
        batch = self._batch
        tokens = self.rules.tokens(len(prefill.writings), len(_present(batch.writings)))
        turn = await self._run(lambda: [(time.monotonic(), batch.read(prefill, tokens))])
        if prefill.done or any(made for _, made in turn):
            self._prefill = None

    def _write(self, batch: Batch, loop: asyncio.AbstractEventLoop) -> Turn:
        """In the thread. Who listens to a stream hears of each token at once, the others when the turn is over."""
        turn: Turn = []
        until = time.monotonic() + _IN_A_ROW_SECONDS
        for _ in range(_IN_A_ROW):
            made = batch.step()
            turn.append((time.monotonic(), made))
            if not made or self._waiting or self._prefill is not None or turn[-1][0] >= until:
                break
            if not all(one.asking.whole for one, _ in made):
                loop.call_soon_threadsafe(self._hear, turn)
                turn = []
        return turn

    async def _run(self, step: Callable[[], Turn]) -> Turn:
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, step)
        except RuntimeError:  # the pool is shut: the service ends
            self._end(Busy("the service ends; ask again"))
            return []
        turn = await work
        self._hear(turn)
        return turn

    def _hear(self, turn: Turn) -> None:
        for now, made in turn:
            for writing, piece in made:
                self._hand_out(writing, piece, now)

    def _hand_out(self, writing: Writing, piece: Piece | Exception, now: float) -> None:
        asking = writing.asking
        if asking.over:
            return
        if isinstance(piece, Exception):
            asking.fail(piece)
            return
        if piece.tokens:
            self.meter.token(now, asking.watch.began, writing.since)
            writing.since = now
        if piece.finish:
            took = now - asking.watch.taken
            self._text_seconds = _KEPT * self._text_seconds + (1 - _KEPT) * took if self._text_seconds else took
        asking.put(piece)

    def _sweep(self) -> bool:
        """Whom nobody waits for any more hears so, and is not computed for. Whether anybody is left."""
        now = time.monotonic()
        for one in (*self._waiting, *self._inside()):
            if not one.asking.over and one.asking.gone():
                one.asking.fail(Gone("the client left before its text was written"))
            if not one.asking.over and now >= one.asking.deadline:
                one.asking.fail(Expired("the deadline passed before the text was written"))
        self._waiting = deque(one for one in self._waiting if not one.asking.over)
        if self._prefill is not None and not _present(self._prefill.writings):
            self._prefill = None
        return bool(self._waiting or self._prefill or _present(self._batch.writings) or self._batch.writings)

    def _let_in(self) -> None:
        """The first of those who wait, and who is worth reading with them, as far as there is room."""
        if self._prefill is not None or not self._waiting:
            return
        inside = _present(self._batch.writings)
        coming: list[Writing] = []
        for _ in range(together(self._waiting, _TOGETHER, self.rules.rows - len(inside))):
            if self._bytes([*inside, *coming, self._waiting[0]]) > self.rules.cache_bytes:
                break
            coming.append(self._waiting.popleft())
        now = time.monotonic()
        for one in coming:
            one.asking.watch.taken = one.asking.watch.taken or now
        if coming:
            self._prefill = Prefill(self._graph, coming)
            self.meter.tokens_in += sum(len(one.prompt) for one in coming)

    def _inside(self) -> list[Writing]:
        reading = self._prefill.writings if self._prefill else []  # and perhaps of the batch this moment
        return list(dict.fromkeys(_present((*self._batch.writings, *reading))))

    def _bytes(self, writings: Sequence[Writing]) -> int:
        """By what each may grow to: nobody has to be thrown out again."""
        return self.room.bytes(len(writings), max((one.most_positions for one in writings), default=0))


def _present(writings: Iterable[Writing]) -> list[Writing]:
    return [one for one in writings if not one.ended and not one.asking.over]
