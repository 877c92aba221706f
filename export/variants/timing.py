"""How long a file takes, measured in turns with the others so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # type: ignore[import-untyped]

from export.sessions import open_session
from pipeline.contract.codec import Array
from pipeline.statistics.intervals import Interval

Rounds = Sequence[Array]  # seconds of every call, round by round
Feed = Mapping[str, Array]

SIZES = (1, 32)  # instances in a call
_ROUNDS = 100
_MIN_ROUNDS = 7  # the range of 6 or more medians contains the true one at 95 %
_MAX_CALLS = 10  # of one file in a round; rounds must be short, since the machine's speed changes
_WARM_UP = 3  # calls, which allocate buffers


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one file at each batch size, and its time relative to the first file's."""

    p50_ms: Mapping[int, Interval]
    p99_ms: Mapping[int, Interval]
    share: Interval


def measure_times(
    paths: Mapping[str, Path], feeds: Mapping[int, Feed], seconds: float, threads: int, confidence: float
) -> dict[str, Timing]:
    """Time every file; shares are relative to the first one. Threads that spin would slow down the next file."""
    sessions = {name: open_session(path, threads, spinning=False) for name, path in paths.items()}
    seconds_per_size = seconds / len(feeds)
    laps = {size: _measure_rounds(sessions, feed, seconds_per_size) for size, feed in feeds.items()}
    rounds = {name: {size: lap[name] for size, lap in laps.items()} for name in paths}
    reference = rounds[next(iter(paths))]
    return {name: timing(rounds_by_size, reference, confidence) for name, rounds_by_size in rounds.items()}


def timing(rounds_by_size: Mapping[int, Rounds], reference_rounds: Mapping[int, Rounds], confidence: float) -> Timing:
    """Summarise the measured rounds by quantiles and their intervals."""
    p50, p99 = {}, {}
    for size, rounds in rounds_by_size.items():
        calls = np.concatenate(list(rounds)) * 1e3
        medians = np.array([np.median(calls_of_round) for calls_of_round in rounds]) * 1e3
        low, high = quantile_bounds(medians, 0.5, confidence)
        median = float(np.median(calls))
        p50[size] = Interval(median, min(low, median), max(high, median))
        p99[size] = Interval(float(np.quantile(calls, 0.99)), *quantile_bounds(calls, 0.99, confidence))
    return Timing(p50, p99, time_ratio(rounds_by_size, reference_rounds, confidence))


def time_ratio(
    rounds_by_size: Mapping[int, Rounds], reference_rounds: Mapping[int, Rounds], confidence: float
) -> Interval:
    """Return the ratio of the medians of a round, as the geometric mean over the batch sizes."""
    logs = []
    for size, rounds_of_size in rounds_by_size.items():
        pairs = zip(rounds_of_size, reference_rounds[size], strict=True)
        logs.append(np.array([math.log(np.median(own) / np.median(reference)) for own, reference in pairs]))
    rounds = min(map(len, logs))
    ratios = np.mean([ratios_of_size[:rounds] for ratios_of_size in logs], axis=0)
    low, high = quantile_bounds(ratios, 0.5, confidence)
    return Interval(*(math.exp(value) for value in (float(np.median(ratios)), low, high)))


def quantile_bounds(values: Array, level: float, confidence: float) -> tuple[float, float]:
    """Return the order statistics that bracket the true quantile; infinite if there are too few values.

    How many of the values lie below the true quantile is binomial, whatever they are distributed like.
    """
    probability_below = scipy.special.bdtr(np.arange(len(values) + 1), len(values), level)
    tail = (1 - confidence) / 2
    low = int((probability_below <= tail).sum())  # it is unlikely that so few values are below
    high = int((1 - probability_below > tail).sum()) + 1
    ordered = np.sort(values)
    return float(ordered[low - 1]) if low else -math.inf, float(ordered[high - 1]) if high <= len(values) else math.inf


def _measure_rounds(sessions: Mapping[str, Any], feed: Feed, seconds: float) -> dict[str, list[Array]]:
    """Measure rounds in which every file runs; the first file of a round rotates."""
    slowest = max(float(_calls(session, feed, _WARM_UP).min()) for session in sessions.values())
    rounds = max(_MIN_ROUNDS, min(_ROUNDS, int(seconds / slowest)))
    calls = max(1, min(_MAX_CALLS, int(seconds / rounds / slowest)))
    names, times = list(sessions), {name: list[Array]() for name in sessions}
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            # The first call finds caches of the other files.
            times[name].append(_calls(sessions[name], feed, 1 + calls)[1:])
    return times


def _calls(session: Any, feed: Feed, count: int) -> Array:
    seconds, inputs = np.empty(count), dict(feed)
    for index in range(count):
        started = time.perf_counter()
        session.run(None, inputs)
        seconds[index] = time.perf_counter() - started
    return seconds
