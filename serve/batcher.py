"""Requests that wait at the same moment run as one batch: merged along the first axis, split back exactly."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serve.refusal import Busy, Expired
from serve.watch import Watch

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Run = Callable[[Arrays, Sequence[str]], dict[str, Array]]
Key = tuple[Any, ...]

_QUICK_SECONDS = 300e-6  # a run below it costs less on the event loop than the way to a thread and back


@dataclass(frozen=True)
class Rules:
    """`mergeable`: the model answers each row by itself. `waiting`: most requests that wait."""

    mergeable: bool
    rows: int = 32
    waiting: int = 1024
    delay_seconds: float = 0.0
    parallel: int = 1


@dataclass(slots=True, eq=False)
class Item:
    arrays: Arrays
    wanted: tuple[str, ...]
    rows: int
    key: Key
    deadline: float
    gone: Callable[[], bool]
    answer: asyncio.Future[dict[str, Array]]
    since: float
    watch: Watch


@dataclass(eq=False)
class Seen:
    """What the metrics tell of it; called in the thread a batch ran in, with its size and the seconds it took."""

    batch: Callable[[int, int, float], None] = field(default=lambda _requests, _rows, _seconds: None)


def _here() -> bool:
    return False


class Batcher:
    """Belongs to one event loop. `run` is called on it when it is known to be quick, else in `pool`."""

    def __init__(self, run: Run, rules: Rules, pool: Executor, seen: Seen | None = None) -> None:
        self._run, self.rules, self._pool, self._seen = run, rules, pool, seen or Seen()
        self._lanes: dict[Key, deque[Item]] = {}
        self._waiting = self._running = 0
        self._scheduled = self._merged = False
        self._seconds: dict[int, float] = {}  # by the size of a batch, in powers of two

    @property
    def waiting(self) -> int:
        return self._waiting

    async def outputs(
        self,
        arrays: Arrays,
        wanted: Sequence[str],
        deadline: float = math.inf,
        gone: Callable[[], bool] = _here,
        watch: Watch | None = None,
    ) -> dict[str, Array]:
        """The wanted outputs for these rows. A deadline is a time of `time.monotonic`."""
        if self._waiting >= self.rules.waiting:
            raise Busy(f"{self._waiting} requests wait already; try again in a moment")
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if now >= deadline:
            raise Expired("the deadline passed before the request could be computed")
        names = tuple(wanted)
        key, rows = key_of(arrays, names)
        item = Item(arrays, names, rows, key, deadline, gone, loop.create_future(), now, watch or Watch())
        self._lanes.setdefault(key, deque()).append(item)
        self._waiting += 1
        self._schedule()
        return await item.answer

    def _schedule(self) -> None:
        """Look at what waits once all that arrived in this turn of the loop has been read."""
        if not self._scheduled and self._waiting and self._running < self.rules.parallel:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            pause = self._pause() if self._merged and self.rules.delay_seconds else 0.0
            if pause:
                loop.call_later(pause, self._turn)
            else:
                loop.call_soon(self._turn)

    def _pause(self) -> float:
        """Under load wait for company; whoever is alone never waits."""
        oldest = min(lane[0].since for lane in self._lanes.values())
        full = any(sum(item.rows for item in lane) >= self.rules.rows for lane in self._lanes.values())
        return 0.0 if full else max(0.0, self.rules.delay_seconds - (time.monotonic() - oldest))

    def _turn(self) -> None:
        self._scheduled = False
        if self._running >= self.rules.parallel:
            return
        if batch := self._take():
            self._start(batch)
        self._schedule()

    def _take(self) -> list[Item]:
        """The oldest that waits, and those it can run with. Who gave up or came too late is left out."""
        batch: list[Item] = []
        rows = 0
        while not batch and self._lanes:
            key = min(self._lanes, key=lambda one: self._lanes[one][0].since)
            lane = self._lanes[key]
            while lane and (not batch or (self.rules.mergeable and rows + lane[0].rows <= self.rules.rows)):
                item = lane.popleft()
                self._waiting -= 1
                if self._wants(item):
                    batch.append(item)
                    rows += item.rows
            if not lane:
                del self._lanes[key]
        return batch

    def _wants(self, item: Item) -> bool:
        if item.answer.done():
            return False
        if item.gone():
            item.answer.cancel()
            return False
        now = time.monotonic()
        if now >= item.deadline:
            item.answer.set_exception(Expired("the deadline passed while the request waited; it was not computed"))
            return False
        item.watch.taken = now
        return True

    def _start(self, batch: list[Item]) -> None:
        self._merged = len(batch) > 1
        known = self._seconds.get(size_of(batch))
        if known is not None and known < _QUICK_SECONDS:
            self._conclude(batch, self._attempt(batch))
            return
        self._running += 1
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._attempt, batch)
        work.add_done_callback(lambda done: self._finish(batch, done))

    def _finish(self, batch: list[Item], done: asyncio.Future[list[Any]]) -> None:
        self._running -= 1
        if done.cancelled():  # the service ends
            for item in batch:
                item.answer.cancel()
            return
        self._conclude(batch, done.result())
        self._schedule()

    def _conclude(self, batch: list[Item], answers: list[Any]) -> None:
        for item, answer in zip(batch, answers, strict=True):
            if item.answer.done():
                continue
            if isinstance(answer, Exception):
                item.answer.set_exception(answer)
            else:
                item.answer.set_result(answer)

    def _attempt(self, batch: list[Item]) -> list[Any]:
        """The outputs of each, or what was raised for it alone."""
        began = time.perf_counter()
        try:
            found = split(self._run(merge(batch), batch[0].wanted), batch)
        except Exception as error:  # it may be one request's fault: each is asked alone
            return [error] if len(batch) == 1 else [one for item in batch for one in self._attempt([item])]
        seconds, place = time.perf_counter() - began, size_of(batch)
        self._seconds[place] = 0.8 * self._seconds.get(place, seconds) + 0.2 * seconds
        self._seen.batch(len(batch), sum(item.rows for item in batch), seconds)
        return found


def key_of(arrays: Arrays, wanted: tuple[str, ...]) -> tuple[Key, int]:
    """What may run together has one key; and the rows, by the first axis."""
    kinds = tuple((name, array.dtype.char, array.shape[1:]) for name, array in arrays.items())
    sizes = {array.shape[0] if array.ndim else 1 for array in arrays.values()}
    return (wanted, kinds), max(sizes, default=1)


def size_of(batch: Sequence[Item]) -> int:
    """Of the inputs, as a power of two."""
    return sum(array.size for item in batch for array in item.arrays.values()).bit_length()


def merge(batch: Sequence[Item]) -> Arrays:
    if len(batch) == 1:
        return batch[0].arrays
    return {name: np.concatenate([item.arrays[name] for item in batch]) for name in batch[0].arrays}


def split(outputs: Mapping[str, Array], batch: Sequence[Item]) -> list[dict[str, Array]]:
    """Each request's own rows again."""
    if len(batch) == 1:
        return [dict(outputs)]
    rows = sum(item.rows for item in batch)
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {rows} rows")
    found, place = [], 0
    for item in batch:
        found.append({name: array[place : place + item.rows] for name, array in outputs.items()})
        place += item.rows
    return found
