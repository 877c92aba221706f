"""How long a file takes, measured in turns with the others so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from pipeline.contract.statistics.bootstrap import Interval

Array = np.ndarray[Any, Any]
Rounds = Sequence[Array]  # seconds of every call, round by round
Feed = Mapping[str, Array]

SIZES = (1, 32)  # instances in a call
_ROUNDS = 100
_FEWEST_ROUNDS = 7  # with 6 and more, the range of the medians holds the true one at 95 %
_MOST_CALLS = 10  # of one file in a round: a round is over before the machine changes its mind
_WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Of one file: milliseconds at each batch size, and its time as a share of the first file's."""

    p50_ms: Mapping[int, Interval]
    p99_ms: Mapping[int, Interval]
    share: Interval


def race(
    paths: Mapping[str, Path], feeds: Mapping[int, Feed], seconds: float, threads: int, confidence: float
) -> dict[str, Timing]:
    """Of every file; the first is the one that shares are of."""
    sessions = {name: _session(path, threads) for name, path in paths.items()}
    each = seconds / len(feeds)
    laps = {size: _laps(sessions, feed, each) for size, feed in feeds.items()}
    first = next(iter(paths))
    return {
        name: timing(
            {size: lap[name] for size, lap in laps.items()},
            {size: lap[first] for size, lap in laps.items()},
            confidence,
        )
        for name in paths
    }


def timing(own: Mapping[int, Rounds], first: Mapping[int, Rounds], confidence: float) -> Timing:
    """What was measured, in words of quantiles; pure."""
    p50, p99 = {}, {}
    for size, rounds in own.items():
        calls = np.concatenate(list(rounds)) * 1e3
        medians = np.array([np.median(one) for one in rounds]) * 1e3
        low, high = quantile_bounds(medians, 0.5, confidence)
        middle = float(np.median(calls))
        p50[size] = Interval(middle, min(low, middle), max(high, middle))
        p99[size] = Interval(float(np.quantile(calls, 0.99)), *quantile_bounds(calls, 0.99, confidence))
    return Timing(p50, p99, share_of_time(own, first, confidence))


def share_of_time(own: Mapping[int, Rounds], first: Mapping[int, Rounds], confidence: float) -> Interval:
    """Ratio of the medians of a round, as the geometric mean over the batch sizes: none of them decides alone."""
    logs = [
        np.array([math.log(np.median(a) / np.median(b)) for a, b in zip(own[size], first[size], strict=True)])
        for size in own
    ]
    turns = min(map(len, logs))
    ratios = np.mean([one[:turns] for one in logs], axis=0)
    low, high = quantile_bounds(ratios, 0.5, confidence)
    return Interval(*(math.exp(value) for value in (float(np.median(ratios)), low, high)))


def quantile_bounds(values: Array, level: float, confidence: float) -> tuple[float, float]:
    """Return the order statistics that bracket the true quantile; infinite if there are too few values.

    How many of the values lie below the true quantile is binomial, whatever they are distributed like.
    """
    below = _binomial(len(values), level)
    tail = (1 - confidence) / 2
    low = int((below <= tail).sum())  # of so many values below, or fewer, the chance is small
    high = int((1 - below > tail).sum()) + 1
    ordered = np.sort(values)
    return float(ordered[low - 1]) if low else -math.inf, float(ordered[high - 1]) if high <= len(values) else math.inf


def _binomial(count: int, level: float) -> Array:
    """The chance of at most 0, 1, … of `count`."""
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(level) + (count - k) * math.log1p(-level)
        for k in range(count + 1)
    ]  # fmt: skip
    return np.cumsum(np.exp(logs))


def _laps(sessions: Mapping[str, Any], feed: Feed, seconds: float) -> dict[str, list[Array]]:
    """Rounds in which every file has its turn; who begins changes."""
    slowest = max(_warm(session, feed) for session in sessions.values())
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(seconds / slowest)))
    calls = max(1, min(_MOST_CALLS, int(seconds / rounds / slowest)))
    names, found = list(sessions), {name: list[Array]() for name in sessions}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(_calls(sessions[name], feed, 1 + calls)[1:])  # the first finds the others' caches
    return found


def _warm(session: Any, feed: Feed) -> float:
    """Seconds of a call once buffers are there."""
    return float(_calls(session, feed, _WARM_UP).min())


def _calls(session: Any, feed: Feed, count: int) -> Array:
    seconds, inputs = np.empty(count), dict(feed)
    for place in range(count):
        started = time.perf_counter()
        session.run(None, inputs)
        seconds[place] = time.perf_counter() - started
    return seconds


def _session(path: Path, threads: int) -> Any:
    """As the service opens it: threads that spin while they wait would take the core from the next file's turn."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    for pool in ("intra", "inter"):
        options.add_session_config_entry(f"session.{pool}_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
