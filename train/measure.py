"""What a line of the journal says of the steps since the line before."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from train.feed import Feed
from train.group import Group
from train.precision import Precision
from train.strategy import Alone
from train.window import Window

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in


@dataclass(frozen=True)
class Reading:
    """This process's running totals at one moment."""

    waited_seconds: float
    sent_bytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class Measured:
    broken: bool  # a loss of some process was not finite
    values: dict[str, Any]


class Meter:
    def __init__(self, strategy: Alone, feed: Feed, precision: Precision, group: Group) -> None:
        self._strategy, self._feed, self._precision, self._group = strategy, feed, precision, group
        self._before = self._read()

    def restart(self) -> None:
        """What happened so far belongs to no line."""
        self._before = self._read()

    def measure(self, window: Window) -> Measured:
        """All take part: the loss is of the global batches, shares of time are means over the processes."""
        seconds = max(time.perf_counter() - window.started, 1e-9)
        before, now = self._before, self._read()
        exposed = (now.exposed_seconds - before.exposed_seconds) / seconds
        memory = [0.0] * self._group.size  # a place for each process, so that a sum tells the largest
        memory[self._group.rank.rank] = memory_mb(self._group.device)
        broken = window.broken()[0] is not None
        total = self._group.total([broken, window.loss(), exposed, *memory])
        found = {
            "loss": total[1] / window.samples,
            "grad_norm": float(window.norms[-1]),
            "samples_per_second": window.samples / seconds,
            "step_seconds": seconds / window.steps,
            "data_wait_share": (now.waited_seconds - before.waited_seconds) / seconds,
            "sent_bytes_per_step": (now.sent_bytes - before.sent_bytes) / window.steps,
            "communication_share": total[2] / self._group.size if self._sees_waiting() else None,
            "memory_mb": max(total[3:]),
            "gpu_utilization": gpu_utilization(self._group.device),
            **self._precision.told(),
        }
        return Measured(bool(total[0]), {name: value for name, value in found.items() if _worth_telling(value)})

    def _sees_waiting(self) -> bool:
        """Processes that cut a model between them wait in the midst of its passes too: a timeline tells."""
        apart = self._group.model_size == 1 and not self._strategy.together
        return apart and self._strategy.traffic.exposed_seconds > 0

    def _read(self) -> Reading:
        self._strategy.stopwatch.collect()
        traffic = self._strategy.traffic
        return Reading(self._feed.waited_seconds, traffic.sent_bytes, traffic.exposed_seconds)


def memory_mb(device: torch.device) -> float:
    """The most this process has held at once: on the GPU where it has one, else altogether."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**20


def gpu_utilization(device: torch.device) -> float | None:
    """Share of the last second in which the GPU computed, or nothing where its driver's library is not installed."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # NVML refuses on parts of a GPU and without rights, by errors of its own: no reason to stop
        return None


def _worth_telling(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
