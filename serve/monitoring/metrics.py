"""Histograms and counters of one model version, kept as plain numbers until they are read.

They live and end with the version. `snapshot.py` collects those of all versions and adds up several processes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PROMPT_SECONDS = (*SECONDS, 30.0, 60.0)  # a long prompt waits, and takes time to read
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PHASES = ("read", "wait", "run", "write")
SUCCESS = (200, "OK")  # statuses of HTTP and gRPC
_BUFFERED_REQUESTS = 256
_MAX_BATCH_SIZES = 256  # that are counted one by one


class Histogram:
    """The number of values up to each bound and beyond the last."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, values: Sequence[float]) -> None:
        """Count many values at once, which costs a fraction of observing each."""
        added = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + int(more) for count, more in zip(self.counts, added, strict=True)]
        self.total += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, each with its bound as Prometheus writes it."""
        buckets, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


class ModelMetrics:
    """The metrics of one model version, or of the requests that named no loaded model."""

    def __init__(self) -> None:
        self.requests = Counter[tuple[str, int | str]]()
        self.rejected = Counter[str]()
        self.seconds: defaultdict[str, Histogram] = defaultdict(partial(Histogram, SECONDS))
        self.phases = {phase: Histogram(SECONDS) for phase in PHASES}
        self.batch_rows, self.batch_requests = Histogram(SIZES), Histogram(SIZES)
        self.batch_seconds = Histogram(SECONDS)
        self.batch_sizes: dict[int, list[float]] = {}  # rows of a batch → batches, and their seconds
        self.failed, self.failed_seconds = 0, 0.0  # requests that were not answered with a prediction
        self.last_request_at = 0.0  # seconds since the epoch
        self._lock = threading.Lock()
        # Protocol, status, seconds and phase lengths of requests that are not in the histograms yet.
        self._buffer: list[tuple[str, int | str, float, Sequence[float]]] = []

    def record_batch(self, requests: int, rows: int, seconds: float) -> None:
        """Count one run of the model; called in whichever thread it ran."""
        with self._lock:
            self.batch_requests.observe(requests)
            self.batch_rows.observe(rows)
            self.batch_seconds.observe(seconds)
            if rows in self.batch_sizes or len(self.batch_sizes) < _MAX_BATCH_SIZES:
                batches, total = self.batch_sizes.get(rows, (0, 0.0))
                self.batch_sizes[rows] = [batches + 1, total + seconds]

    def record_request(self, protocol: str, status: int | str, seconds: float, times: Sequence[float] = ()) -> None:
        """Count a request that has ended, with the times of its phases if it was answered; on the event loop."""
        self.last_request_at = time.time()
        self._buffer.append((protocol, status, seconds, times))
        if len(self._buffer) >= _BUFFERED_REQUESTS:
            self.flush()

    def flush(self) -> None:
        """Bring the counters and histograms up to date; call this before reading them."""
        buffer, self._buffer = self._buffer, []
        for protocol, status, taken, _ in buffer:
            self.requests[protocol, status] += 1
            if status not in SUCCESS:
                self.failed += 1
                self.failed_seconds += taken
        for protocol in {protocol for protocol, _, _, _ in buffer}:
            self.seconds[protocol].add([seconds for name, _, seconds, _ in buffer if name == protocol])
        if answered := [times for _, _, _, times in buffer if times]:
            for phase, seconds in zip(PHASES, np.diff(answered).T.tolist(), strict=True):
                self.phases[phase].add(seconds)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        with self._lock:
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


class TokenMetrics:
    """The tokens of one language model, counted on the event loop."""

    def __init__(self) -> None:
        self.tokens_in = self.tokens_out = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens of prompts, and those found in the prefix cache
        self.preemptions = 0
        self.first_seconds, self.between_seconds = Histogram(_PROMPT_SECONDS), Histogram(SECONDS)

    def record_token(self, now: float, received_at: float, previous_at: float) -> None:
        """Count a generated token; `previous_at` is when the one before it came, 0 for the first of a text."""
        self.tokens_out += 1
        if previous_at:
            self.between_seconds.observe(now - previous_at)
        else:
            self.first_seconds.observe(now - received_at)


@dataclass
class Tokens:
    """Those of one language model."""

    metrics: TokenMetrics
    running: int  # texts
    waiting: int
    cache_bytes: int
    max_cache_bytes: int
    prefix_bytes: int


_LARGEST = ("last_request_at", "max_difference")  # of which the largest of all processes counts


def add(one: Any, other: Any, name: object = "") -> Any:
    """Return what two processes have counted, in the place of the first; other values and tuples are those of both."""
    if type(one) in (int, float):
        return max(one, other) if name in _LARGEST else one + other
    if isinstance(one, list):
        return list(map(add, one, other))
    if isinstance(one, dict):
        one |= {key: add(one[key], value, key) if key in one else value for key, value in other.items()}
    elif hasattr(one, "__dict__"):
        add(one.__dict__, other.__dict__)
    return one
