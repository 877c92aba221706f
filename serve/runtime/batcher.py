"""Requests that wait at the same moment run as one batch, in the order they came; who waits in vain hears so.

Requests as parts of one batch: which may run together, joined along the first axis, split back exactly.

How long the model takes, learned as it runs: whether a batch is quick, and how long a queue will last.
"""

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

from serve.errors import Busy, Expired, Gone
from serve.request_context import Watch

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Key = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Item:
    """One request that waits. `deadline` is a time of `time.monotonic`; `gone` tells whether its client left."""

    arrays: Arrays
    wanted: tuple[str, ...]
    rows: int
    key: Key
    deadline: float
    gone: Callable[[], bool]
    answer: asyncio.Future[dict[str, Array]]
    since: float
    watch: Watch


def key_of(arrays: Arrays, wanted: tuple[str, ...]) -> tuple[Key, int]:
    """What may run together has one key; and the rows, by the first axis."""
    kinds, rows = [], 0
    for name, array in arrays.items():
        shape = array.shape
        kinds.append((name, array.dtype.char, shape[1:]))
        if shape and shape[0] > rows:
            rows = shape[0]
    return (wanted, tuple(kinds)), rows or 1


def size_of(batch: Sequence[Item]) -> int:
    """Of the inputs, as a power of two."""
    return sum([array.size for item in batch for array in item.arrays.values()]).bit_length()


def rows_of(batch: Sequence[Item]) -> int:
    return sum(item.rows for item in batch)


def merge(batch: Sequence[Item]) -> Arrays:
    if len(batch) == 1:
        return batch[0].arrays
    return {name: np.concatenate([item.arrays[name] for item in batch]) for name in batch[0].arrays}


def split(outputs: Mapping[str, Array], batch: Sequence[Item]) -> list[dict[str, Array]]:
    """Each request's own rows again."""
    if len(batch) == 1:
        return [dict(outputs)]
    rows = rows_of(batch)
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {rows} rows")
    found, place = [], 0
    for item in batch:
        found.append({name: array[place : place + item.rows] for name, array in outputs.items()})
        place += item.rows
    return found


Run = Callable[[Arrays, Sequence[str]], dict[str, Array]]

_CAUTION = 1.6  # other processes may take the machine meanwhile: what is let in must not come too late then
_TURN_SECONDS = 0.005  # for full batches that run on the loop, one after the other
_SWEEP_SECONDS = 0.02  # between two looks at a full queue for room that those who left have made
_TICK_SECONDS = 1e-3  # the loop's timers may be early by less than it


@dataclass(frozen=True)
class Rules:
    """`mergeable`: the model answers each row by itself. `waiting`: most requests that wait. `computes`: on processors
    of this machine, so that of a run only the time counts that its thread has one of them.
    """

    mergeable: bool
    rows: int = 32
    waiting: int = 1024
    delay_seconds: float = 0.0
    computes: bool = False


@dataclass(slots=True)
class Lane:
    """Those that may run together, oldest first."""

    items: deque[Item] = field(default_factory=deque)
    rows: int = 0


@dataclass(eq=False)
class Seen:
    """What the metrics tell of it; called in the thread a batch ran in, with its size and the seconds it took."""

    batch: Callable[[int, int, float], None] = field(default=lambda _requests, _rows, _seconds: None)


def stays() -> bool:
    """The client of whom nobody can tell whether it left."""
    return False


class Batcher:
    """Belongs to one event loop. `run` is called on it when it is known to be quick, else in `pool`."""

    def __init__(self, run: Run, rules: Rules, pool: Executor, seen: Seen | None = None) -> None:
        self._run, self.rules, self._pool, self._seen = run, rules, pool, seen or Seen()
        self._lanes: dict[Key, Lane] = {}
        self._pace = Pace()
        self._waiting = self._rows = 0
        self._running = self._scheduled = False
        self._paused: asyncio.TimerHandle | None = None  # the turn after a wait for company
        self._alarm: asyncio.TimerHandle | None = None  # at the first deadline among those that wait
        self._alarm_at = math.inf
        self._swept = self._merged = -math.inf
        self._ends = 0.0  # when what runs is expected to be done

    @property
    def waiting(self) -> int:
        return self._waiting

    def admit(self, deadline: float = math.inf, others: int = 0) -> None:
        """Refuse at once what has no room, or no hope; `others` are on their way here and not counted yet."""
        now = time.monotonic()
        if now >= deadline:
            raise Expired("the deadline passed before the request could be computed")
        waiting = self._waiting + others
        if waiting >= self.rules.waiting:
            if now - self._swept > _SWEEP_SECONDS:
                self._sweep(now)
                waiting = self._waiting + others
            if waiting >= self.rules.waiting:
                raise Busy(
                    f"{waiting} requests wait already; try again in a moment", self.expected_seconds(now, others)
                )
        if deadline < math.inf and waiting:  # where nobody waits the estimate is not asked: so it is renewed
            seconds = self.expected_seconds(now, others)
            if now + seconds * _CAUTION > deadline:
                raise Busy(f"the requests before it take about {seconds:.2g} s, longer than its deadline", seconds)

    def expected_seconds(self, now: float, others: int = 0) -> float:
        """Until one that comes now would be answered."""
        left = max(0.0, self._ends - now) if self._running else 0.0
        return left + self._pace.seconds(self._rows + others + 1)

    async def outputs(
        self,
        arrays: Arrays,
        wanted: Sequence[str],
        deadline: float = math.inf,
        gone: Callable[[], bool] = stays,
        watch: Watch | None = None,
        alone: bool = False,
    ) -> dict[str, Array]:
        """The wanted outputs for these rows. A deadline is a time of `time.monotonic`.

        `alone`: nobody else asks, so that nothing is gained by looking for company.
        """
        self.admit(deadline)
        names = tuple(wanted)
        key, rows = key_of(arrays, names)
        answer: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        item = Item(arrays, names, rows, key, deadline, gone, answer, time.monotonic(), watch or Watch())
        if alone and not self._waiting and not self._running and self._pace.quick(size_of((item,))):
            item.watch.taken = item.since
            self._conclude([item], self._attempt([item]))
            return answer.result()
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane()
        lane.items.append(item)
        lane.rows += rows
        self._rows += rows
        self._waiting += 1
        self._schedule()
        if deadline < self._alarm_at:
            self._arm(deadline)
        return await answer

    def _schedule(self) -> None:
        """Look at what waits once all that arrived in this turn of the loop has been read."""
        if self._scheduled or not self._waiting or self._running:
            return
        pause = self._pause() if self.rules.delay_seconds else 0.0
        if self._paused is not None:
            if pause:
                return
            self._paused.cancel()
            self._paused = None
        if pause:
            self._paused = asyncio.get_running_loop().call_later(pause, self._turn)
        else:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _pause(self) -> float:
        """Under load wait for company; whoever is alone never waits."""
        now, delay = time.monotonic(), self.rules.delay_seconds
        if now - self._merged > delay or not self.rules.mergeable:
            return 0.0
        full = any(lane.rows >= self.rules.rows for lane in self._lanes.values())
        return 0.0 if full else max(0.0, delay - (now - self._oldest().items[0].since))

    def _turn(self) -> None:
        self._scheduled = False
        self._paused = None
        if self._running:
            return
        end = time.monotonic() + _TURN_SECONDS
        while batch := self._take():
            self._start(batch)
            if self._running or self._rows < self.rules.rows or time.monotonic() >= end:
                break  # else another at once, for a turn of the loop is long when many ask
        self._schedule()

    def _oldest(self) -> Lane:
        lanes = self._lanes.values()
        return next(iter(lanes)) if len(lanes) == 1 else min(lanes, key=lambda lane: lane.items[0].since)

    def _take(self) -> list[Item]:
        """The oldest that waits, and those it can run with. Who gave up, came too late or would be late is left out."""
        batch: list[Item] = []
        rows, now = 0, time.monotonic()
        done = now + self._pace.run_seconds(min(self._rows, self.rules.rows))
        while not batch and self._lanes:
            lane = self._oldest()
            key = lane.items[0].key
            while lane.items and (not batch or (self.rules.mergeable and rows + lane.items[0].rows <= self.rules.rows)):
                item = lane.items.popleft()
                self._waiting -= 1
                self._rows -= item.rows
                lane.rows -= item.rows
                # Of those for whom it is too late the last is computed: else an estimate too high was never renewed.
                if not settled(item, now, done if batch or self._waiting else now):
                    item.watch.taken = now
                    batch.append(item)
                    rows += item.rows
            if not lane.items:
                del self._lanes[key]
        self._pace.taken(rows, now, more=self._waiting > 0)
        return batch

    def _start(self, batch: list[Item]) -> None:
        if self._pace.quick(size_of(batch)):
            self._conclude(batch, self._attempt(batch))
            return
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, self._attempt, batch)
        except RuntimeError:  # the pool is shut: the service ends
            self._conclude(batch, [Busy("the service ends; ask again")] * len(batch))
            return
        self._running = True
        self._ends = time.monotonic() + self._pace.seconds(rows_of(batch))
        work.add_done_callback(lambda done: self._finish(batch, done))

    def _finish(self, batch: list[Item], done: asyncio.Future[list[Any]]) -> None:
        self._running = False
        if done.cancelled():  # the service ends
            answers: list[Any] = [Busy("the service ends; ask again")] * len(batch)
        else:
            answers = [error] * len(batch) if (error := done.exception()) else done.result()
        self._conclude(batch, answers)
        self._schedule()

    def _conclude(self, batch: list[Item], answers: list[Any]) -> None:
        if len(batch) > 1:
            self._merged = time.monotonic()
        for item, answer in zip(batch, answers, strict=True):
            if item.answer.done():
                continue
            if isinstance(answer, BaseException):
                item.answer.set_exception(answer)
            else:
                item.answer.set_result(answer)

    def _attempt(self, batch: list[Item]) -> list[Any]:
        """The outputs of each, or what was raised for it alone."""
        began, computing = time.perf_counter(), time.thread_time()
        try:
            found = split(self._run(merge(batch), batch[0].wanted), batch)
        except Exception as error:  # it may be one request's fault: by halves, it is found and the others are answered
            if len(batch) == 1:
                return [error]
            half = len(batch) // 2
            return [*self._attempt(batch[:half]), *self._attempt(batch[half:])]
        seconds, rows = time.perf_counter() - began, rows_of(batch)
        own = time.thread_time() - computing if self.rules.computes else math.inf
        self._pace.learn(size_of(batch), rows, seconds, own)
        self._seen.batch(len(batch), rows, seconds)
        return found

    def _arm(self, deadline: float) -> None:
        """Who waits behind a long run hears at its deadline, not after the run."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, deadline
        if deadline < math.inf:
            pause = max(0.0, deadline - time.monotonic()) + _TICK_SECONDS
            self._alarm = asyncio.get_running_loop().call_later(pause, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._sweep(time.monotonic())
        waiting = (item.deadline for lane in self._lanes.values() for item in lane.items)
        self._arm(min(waiting, default=math.inf))

    def _sweep(self, now: float) -> None:
        """Those that wait no longer, out of the queue."""
        self._swept = now
        self._waiting = self._rows = 0
        for key, lane in list(self._lanes.items()):
            lane.items = deque(item for item in lane.items if not settled(item, now))
            lane.rows = rows_of(lane.items)
            self._waiting += len(lane.items)
            self._rows += lane.rows
            if not lane.items:
                del self._lanes[key]


def settled(item: Item, now: float, done: float = -math.inf) -> bool:
    """Whether nobody waits for it any more, or would when it was `done`; whom it concerns is told."""
    if item.answer.done():
        return True
    if item.gone():
        item.answer.set_exception(Gone("the client left before its request was computed"))
        return True
    if now >= item.deadline:
        item.answer.set_exception(Expired("the deadline passed while the request waited; it was not computed"))
        return True
    if done > item.deadline:
        item.answer.set_exception(Busy("the requests before it took so long that it would come after its deadline"))
        return True
    return False


_QUICK_SECONDS = 300e-6  # a run below it costs less on the event loop than the way to a thread and back
_LONG_SECONDS = 0.05  # of computing: the model's time depends on what it is given
_WARY_RUNS = 1000  # after such a run, for which nothing of its size is trusted to be quick
_FORGOTTEN = 1.1  # a run that was shorter than those after it counts so much less with each
_KEPT = 0.8  # of what is known when something new is learned
_REMEMBERED_SECONDS = 1.0  # of a queue: several batches may run in one turn of the loop, and none for a while after


class Pace:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the size of a batch
        self._wary: dict[int, int] = {}  # runs still to go, by the size of a batch
        self._total_seconds = self._total_rows = 0.0  # of late, the older the less
        self._taken: tuple[int, float] | None = None  # the batch before, where others waited behind it
        self._spaced_seconds = self._spaced_rows = 0.0  # from batch to batch while others waited, likewise

    def learn(self, size: int, rows: int, seconds: float, computing_seconds: float = math.inf) -> None:
        """`computing_seconds`: those in which the run had the processor, where it does nothing but compute."""
        # The shortest of late: on a busy machine other processes' turns count as ours, and the way to a thread
        # and back would then be added to them.
        own = min(seconds, computing_seconds)
        self._seconds[size] = min(own, self._seconds.get(size, own) * _FORGOTTEN)
        if own > _LONG_SECONDS:
            self._wary[size] = _WARY_RUNS
        elif self._wary:
            self._wary[size] = max(0, self._wary.get(size, 0) - 1)
        self._total_seconds = _KEPT * self._total_seconds + seconds
        self._total_rows = _KEPT * self._total_rows + rows

    def quick(self, size: int) -> bool:
        """Unknown is not quick."""
        return self._seconds.get(size, 1.0) < _QUICK_SECONDS and not self._wary.get(size)

    def taken(self, rows: int, now: float, *, more: bool) -> None:
        """A batch begins, and whether `more` wait behind it: then it is all of the service that the next waits for,
        whose own work for each request may be more than the model's. Where nobody waits any more that is forgotten:
        an estimate that was too high lets nobody wait, and would never be renewed.
        """
        if self._taken is not None and rows:
            before, began = self._taken
            kept = math.exp((began - now) / _REMEMBERED_SECONDS)
            self._spaced_seconds = kept * self._spaced_seconds + now - began
            self._spaced_rows = kept * self._spaced_rows + before
        self._taken = (rows, now) if more and rows else None
        if not more:
            self._spaced_seconds = self._spaced_rows = 0.0

    def seconds(self, rows: int) -> float:
        """Until this many rows are done, in batches such as have run of late; 0 while nothing is known."""
        queued = self._spaced_seconds / self._spaced_rows if self._spaced_rows else 0.0
        return max(self.run_seconds(rows), rows * queued)

    def run_seconds(self, rows: int) -> float:
        """What the model alone takes for them."""
        return rows * self._total_seconds / self._total_rows if self._total_rows else 0.0
