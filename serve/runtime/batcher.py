"""Dynamic batching: requests that wait at the same moment run as one batch, oldest first.

Requests run together if their arrays agree in everything but the number of rows. An estimate of run times, learned from
past batches, decides whether a batch runs on the event loop or in a thread, and how long the queue will take.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pipeline.contract.codec import Array, Arrays
from serve.errors import Busy, ClientDisconnected, DeadlineExceeded
from serve.request_context import RequestContext

Key = tuple[Any, ...]
T = TypeVar("T")


def batch_key(arrays: Arrays, output_names: tuple[str, ...]) -> tuple[Key, int]:
    """Return a key that is equal for requests that may run together, and the number of rows."""
    signature, rows = [], 0
    for name, array in arrays.items():
        shape = array.shape
        signature.append((name, array.dtype.char, shape[1:]))
        if shape and shape[0] > rows:
            rows = shape[0]
    return (output_names, tuple(signature)), rows or 1


def input_size(batch: Sequence[RequestContext]) -> int:
    """Return the bit length of the number of elements of the inputs."""
    return sum([array.size for item in batch for array in item.inputs.values()]).bit_length()


def total_rows(batch: Sequence[RequestContext]) -> int:
    return sum(item.rows for item in batch)


def concatenate(batch: Sequence[RequestContext]) -> Arrays:
    if len(batch) == 1:
        return batch[0].inputs
    return {name: np.concatenate([item.inputs[name] for item in batch]) for name in batch[0].inputs}


def split(outputs: Mapping[str, Array], batch: Sequence[RequestContext]) -> list[dict[str, Array]]:
    """Return each request's own rows."""
    if len(batch) == 1:
        return [dict(outputs)]
    rows = total_rows(batch)
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {rows} rows")
    parts, start = [], 0
    for item in batch:
        parts.append({name: array[start : start + item.rows] for name, array in outputs.items()})
        start += item.rows
    return parts


Run = Callable[[Arrays, Sequence[str]], dict[str, Array]]

_LOOP_SECONDS = 0.005  # for full batches that run on the event loop in a row
_CLEANUP_SECONDS = 0.02  # between two searches of a full queue for requests that are obsolete
_TICK_SECONDS = 1e-3  # timers of the event loop may fire early by less than it


@dataclass(frozen=True)
class BatchingOptions:
    mergeable: bool  # the model answers each row independently of the others
    max_rows: int = 32  # of a batch of several requests
    max_waiting: int = 1024  # requests
    delay_seconds: float = 0.0  # to wait for more requests under load
    cpu_bound: bool = False  # a run only computes, so that its thread's CPU time is what it takes on an idle machine


@dataclass(slots=True)
class Lane:
    """Requests with equal batch keys, oldest first."""

    items: deque[RequestContext] = field(default_factory=deque)
    rows: int = 0


class Batcher:
    """Belongs to one event loop. `run` is called on it where it is known to be quick, else in `pool`."""

    def __init__(
        self,
        run: Run,
        options: BatchingOptions,
        pool: Executor,
        record_batch: Callable[[int, int, float], None] = lambda _requests, _rows, _seconds: None,
    ) -> None:
        """`record_batch` gets the size of each batch and its seconds, in the thread it ran in."""
        self._run, self.options, self._pool, self._record_batch = run, options, pool, record_batch
        self._lanes: dict[Key, Lane] = {}
        self._estimate = RunTimeEstimate()
        self.waiting = self._rows = 0  # requests, and their rows
        self._running = self._scheduled = False
        self._delayed: asyncio.TimerHandle | None = None  # runs the next batch after the delay
        self._deadline_timer: asyncio.TimerHandle | None = None  # at the first deadline of the waiting requests
        self._next_deadline = math.inf
        self._cleaned_at = self._merged_at = -math.inf
        self._expected_end = 0.0  # of the running batch

    def expected_seconds(self, now: float, arriving: int = 0) -> float:
        """Return how long a request that arrives now will take."""
        running = max(0.0, self._expected_end - now) if self._running else 0.0
        return running + self._estimate.queue_seconds(self._rows + arriving + 1)

    async def outputs(
        self, inputs: Arrays, output_names: Sequence[str], request: RequestContext, *, is_only: bool = False
    ) -> dict[str, Array]:
        """Return the named outputs for these inputs, within the request's deadline.

        `is_only`: no other request is in progress, so that waiting for more cannot help.
        """
        request.inputs, request.output_names = inputs, tuple(output_names)
        key, rows = batch_key(inputs, request.output_names)
        request.batch_key, request.rows, request.queued_at = key, rows, time.monotonic()
        if request.queued_at >= request.deadline:
            raise DeadlineExceeded("the deadline passed before the request was queued; it was not computed")
        is_free = is_only and not self.waiting and not self._running
        if is_free and self._estimate.is_quick(size := input_size((request,))):
            request.run_started_at = request.queued_at
            (computed,) = self._compute([request], size)
            if isinstance(computed, BaseException):
                raise computed
            return computed
        answer: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        request.outputs = answer
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane()
        lane.items.append(request)
        lane.rows += rows
        self._rows += rows
        self.waiting += 1
        self._schedule()
        if request.deadline < self._next_deadline:
            self._set_deadline_timer(request.deadline)
        return await answer

    def _schedule(self) -> None:
        """Start a batch after the event loop has read everything that arrived in this iteration."""
        if self._scheduled or not self.waiting or self._running:
            return
        pause = self._delay() if self.options.delay_seconds else 0.0
        if self._delayed is not None:
            if pause:
                return
            self._delayed.cancel()
            self._delayed = None
        if pause:
            self._delayed = asyncio.get_running_loop().call_later(pause, self._run_batches)
        else:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_batches)

    def _delay(self) -> float:
        """Return how long to wait for more requests: only under load, and only while the batch is not full."""
        now, delay = time.monotonic(), self.options.delay_seconds
        if now - self._merged_at > delay or not self.options.mergeable:
            return 0.0
        full = any(lane.rows >= self.options.max_rows for lane in self._lanes.values())
        return 0.0 if full else max(0.0, delay - (now - self._oldest().items[0].queued_at))

    def _run_batches(self) -> None:
        self._scheduled, self._delayed = False, None
        if self._running:
            return
        end = time.monotonic() + _LOOP_SECONDS
        while batch := self._next_batch():
            self._start(batch)
            if self._running or self._rows < self.options.max_rows or time.monotonic() >= end:
                break  # otherwise start another one now: an iteration of the event loop is long under load
        self._schedule()

    def _oldest(self) -> Lane:
        lanes = self._lanes.values()
        return next(iter(lanes)) if len(lanes) == 1 else min(lanes, key=lambda lane: lane.items[0].queued_at)

    def _next_batch(self) -> list[RequestContext]:
        """Return the oldest request and those that can run with it, without obsolete ones."""
        batch: list[RequestContext] = []
        rows, now = 0, time.monotonic()
        done_at = now + self._estimate.run_seconds(min(self._rows, self.options.max_rows))
        while not batch and self._lanes:
            lane = self._oldest()
            key = lane.items[0].batch_key
            while lane.items and (
                not batch or (self.options.mergeable and rows + lane.items[0].rows <= self.options.max_rows)
            ):
                item = lane.items.popleft()
                self.waiting -= 1
                self._rows -= item.rows
                lane.rows -= item.rows
                # The last waiting request runs even if it is expected to be late: otherwise a wrong estimate would
                # never be corrected.
                if not reject_obsolete(item, now, done_at if batch or self.waiting else now):
                    item.run_started_at = now
                    batch.append(item)
                    rows += item.rows
            if not lane.items:
                del self._lanes[key]
        self._estimate.batch_started(rows, now, more=self.waiting > 0)
        return batch

    def _start(self, batch: list[RequestContext]) -> None:
        if self._estimate.is_quick(size := input_size(batch)):
            self._deliver(batch, self._compute(batch, size))
            return
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._compute, batch, size)
        except RuntimeError:  # the pool is shut down
            self._deliver(batch, [Busy("the service is shutting down; try again")] * len(batch))
            return
        self._running = True
        self._expected_end = time.monotonic() + self._estimate.queue_seconds(total_rows(batch))
        future.add_done_callback(lambda done: self._finish(batch, done))

    def _finish(self, batch: list[RequestContext], done: asyncio.Future[Sequence[Any]]) -> None:
        self._running = False
        if done.cancelled():  # the service is shutting down
            answers: Sequence[Any] = [Busy("the service is shutting down; try again")] * len(batch)
        else:
            answers = [error] * len(batch) if (error := done.exception()) else done.result()
        self._deliver(batch, answers)
        self._schedule()

    def _deliver(self, batch: list[RequestContext], answers: Sequence[Any]) -> None:
        if len(batch) > 1:
            self._merged_at = time.monotonic()
        for item, answer in zip(batch, answers, strict=True):
            if item.outputs.done():
                continue
            if isinstance(answer, BaseException):
                item.outputs.set_exception(answer)
            else:
                item.outputs.set_result(answer)

    def _compute(self, batch: list[RequestContext], size: int) -> Sequence[dict[str, Array] | BaseException]:
        """Return for each request its outputs or the exception it causes."""
        reads_cpu_time = self.options.cpu_bound and self._estimate.needs_cpu_time(size)
        started_at, cpu_started_at = time.perf_counter(), time.thread_time() if reads_cpu_time else 0.0
        try:
            parts = split(self._run(concatenate(batch), batch[0].output_names), batch)
        except Exception as error:  # may be caused by one request: halving the batch isolates it
            if len(batch) == 1:
                return [error]
            halves = (batch[: len(batch) // 2], batch[len(batch) // 2 :])
            return [answer for half in halves for answer in self._compute(half, input_size(half))]
        seconds, rows = time.perf_counter() - started_at, total_rows(batch)
        if reads_cpu_time:
            self._estimate.record(size, rows, seconds, time.thread_time() - cpu_started_at)
        else:
            self._estimate.record(size, rows, seconds, None if self.options.cpu_bound else math.inf)
        self._record_batch(len(batch), rows, seconds)
        return parts

    def _set_deadline_timer(self, deadline: float) -> None:
        """Reject waiting requests at their deadline, even while a batch runs."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer, self._next_deadline = None, deadline
        if deadline < math.inf:
            pause = max(0.0, deadline - time.monotonic()) + _TICK_SECONDS
            self._deadline_timer = asyncio.get_running_loop().call_later(pause, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        self._remove_obsolete(time.monotonic())
        waiting = (item.deadline for lane in self._lanes.values() for item in lane.items)
        self._set_deadline_timer(min(waiting, default=math.inf))

    def remove_obsolete_if_due(self, now: float) -> None:
        """Make room in a full queue, unless that was done a moment ago."""
        if now - self._cleaned_at > _CLEANUP_SECONDS:
            self._remove_obsolete(now)

    def _remove_obsolete(self, now: float) -> None:
        """Remove requests whose client is gone or whose deadline has passed."""
        self._cleaned_at = now
        self.waiting = self._rows = 0
        for key, lane in list(self._lanes.items()):
            lane.items = deque(item for item in lane.items if not reject_obsolete(item, now))
            lane.rows = total_rows(lane.items)
            self.waiting += len(lane.items)
            self._rows += lane.rows
            if not lane.items:
                del self._lanes[key]


def reject_obsolete(item: RequestContext, now: float, done_at: float = -math.inf) -> bool:
    """Reject a request that nothing waits for any more, or that would be late if it was done at `done_at`."""
    if item.outputs.done():
        return True
    if item.is_disconnected():
        item.outputs.set_exception(ClientDisconnected("the client disconnected before its request was computed"))
        return True
    if now >= item.deadline:
        error = DeadlineExceeded("the deadline passed while the request waited; it was not computed")
        item.outputs.set_exception(error)
        return True
    if done_at > item.deadline:
        item.outputs.set_exception(Busy("the requests before it took so long that its deadline cannot be met"))
        return True
    return False


_QUICK_SECONDS = 300e-6  # a shorter run costs less on the event loop than handing it to a thread
_LONG_SECONDS = 0.05  # after such a run the model's time obviously depends on the values
_DISTRUSTED_RUNS = 1000  # after a long run no run of its size counts as quick for so many runs
_MINIMUM_GROWTH = 1.1  # per run: the minimum is that of recent runs
_SMOOTHING = 0.8  # weight of the past
_QUEUE_SECONDS = 1.0  # time constant: several batches may run in one iteration of the loop, and none for a while


class RunTimeEstimate:
    """Learns how long runs take, by the size of their inputs, and how fast the queue moves."""

    def __init__(self, quick_seconds: float = _QUICK_SECONDS) -> None:
        self._quick_seconds = quick_seconds
        self._seconds: dict[int, float] = {}  # shortest recent run, by the size of a batch
        self._distrusted: dict[int, int] = {}  # runs until a size is trusted again
        self._cpu_timed: dict[int, int] = {}  # runs of a quick size whose CPU time is still to be read
        self._total_seconds = self._total_rows = 0.0  # exponentially weighted
        # Rows and start of the batch before, if requests waited behind it:
        self._previous: tuple[int, float] | None = None
        # Between starts of batches while requests waited, exponentially weighted:
        self._queue_seconds = self._queue_rows = 0.0

    def needs_cpu_time(self, size: int) -> bool:
        """Return whether to read the CPU time of a run; not of a quick one, unless one took long a while ago.

        Reading it is a system call, which took 1 to 40 microseconds where a small run took 10.
        """
        return not self.is_quick(size) or self._cpu_timed.get(size, 0) > 0

    def record(self, size: int, rows: int, seconds: float, cpu_seconds: float | None = math.inf) -> None:
        """`cpu_seconds`: CPU time of the run's thread; None: not read; infinity: the wall time alone counts."""
        if cpu_seconds is None and seconds >= self._quick_seconds:
            # Either another process had its turn or the values made it slow: the CPU time of the next runs decides.
            self._cpu_timed[size] = _DISTRUSTED_RUNS
        else:
            self._record_own(size, seconds, cpu_seconds)
        self._total_seconds = _SMOOTHING * self._total_seconds + seconds
        self._total_rows = _SMOOTHING * self._total_rows + rows

    def _record_own(self, size: int, seconds: float, cpu_seconds: float | None) -> None:
        """Record the time of one run without that of other processes."""
        # The minimum counts: on a busy machine the turns of other processes are part of the measured time.
        own = seconds if cpu_seconds is None else min(seconds, cpu_seconds)
        self._seconds[size] = min(own, self._seconds.get(size, own) * _MINIMUM_GROWTH)
        if self._cpu_timed:
            self._cpu_timed[size] = max(0, self._cpu_timed.get(size, 0) - 1)
        if own > _LONG_SECONDS:
            self._distrusted[size] = _DISTRUSTED_RUNS
        elif self._distrusted:
            self._distrusted[size] = max(0, self._distrusted.get(size, 0) - 1)

    async def call(self, run: Callable[..., Awaitable[T]], size: int, work: Callable[..., T], *args: Any) -> T:
        """Let `run` call `work` in a thread, or call it directly where such calls are known to be quick."""
        if self.is_quick(size):
            return self._timed(size, work, *args)
        return await run(self._timed, size, work, *args)

    def _timed(self, size: int, work: Callable[..., T], *args: Any) -> T:
        started_at = time.perf_counter()
        result = work(*args)
        self.record(size, 1, time.perf_counter() - started_at)
        return result

    def is_quick(self, size: int) -> bool:
        """Return whether runs of this size are known to be short."""
        return self._seconds.get(size, 1.0) < self._quick_seconds and not self._distrusted.get(size)

    def batch_started(self, rows: int, now: float, *, more: bool) -> None:
        """Measure the time from batch to batch while `more` requests wait.

        It includes the service's own work, which may be more than the model's. It is forgotten once the queue is empty:
        an estimate that is too high would reject every request and never be corrected.
        """
        if self._previous is not None and rows:
            previous_rows, started_at = self._previous
            weight = math.exp((started_at - now) / _QUEUE_SECONDS)
            self._queue_seconds = weight * self._queue_seconds + now - started_at
            self._queue_rows = weight * self._queue_rows + previous_rows
        self._previous = (rows, now) if more and rows else None
        if not more:
            self._queue_seconds = self._queue_rows = 0.0

    def queue_seconds(self, rows: int) -> float:
        """Return the expected time until so many queued rows are done; 0 while nothing is known."""
        per_row = self._queue_seconds / self._queue_rows if self._queue_rows else 0.0
        return max(self.run_seconds(rows), rows * per_row)

    def run_seconds(self, rows: int) -> float:
        """Return the time of the model for so many rows."""
        return rows * self._total_seconds / self._total_rows if self._total_rows else 0.0
