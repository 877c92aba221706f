"""How long the model takes, learned as it runs: whether a batch is quick, and how long a queue will last."""

from __future__ import annotations

import math

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
