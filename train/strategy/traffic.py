"""What the exchange costs this process: bytes, and the time it had nothing else to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from train.phase import phase


@dataclass
class Traffic:
    """Running totals. Seconds stay zero where a strategy does not measure them."""

    sent_bytes: int = 0
    own_seconds: float = 0.0  # forward and backward passes, without waiting for other processes
    exposed_seconds: float = 0.0  # waited for the exchange, with nothing else to do


class Stopwatch:
    """Divides the passes of a step into own work and waiting.

    Gradients meet inside backward(), so the moment between the two is asked of autograd: its callbacks run in order,
    ours is queued before the one in which DistributedDataParallel waits. A moment is a time on CPU and an event on a
    GPU, whose distances are known only later: nothing here makes a GPU wait but `collect`.
    """

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._traffic, self._on_gpu = traffic, device.type == "cuda"
        self._now: Callable[[], Any] = _event if self._on_gpu else time.perf_counter
        self._began: Any = None
        self._computed: Any = None
        self._laps: list[tuple[Any, Any, Any]] = []
        self._waits: list[tuple[Any, Any, bool]] = []
        self._passing = False  # between start and stop
        self._last_wait = contextlib.ExitStack()

    def start(self) -> None:
        self._began, self._computed, self._passing = self._now(), None, True

    def watch(self, loss: Tensor) -> None:
        """No backward pass of this step follows that of `loss`."""
        register: Any = loss.register_hook  # published without types
        register(lambda _: Variable._execution_engine.queue_callback(self._all_computed))

    def stop(self) -> None:
        self._last_wait.close()
        self._passing = False
        if self._computed is not None:
            self._laps.append((self._began, self._computed, self._now()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange that this process sits through, in the midst of the passes or after them."""
        began, passing = self._now(), self._passing
        with phase("exchange"):
            yield
        self._waits.append((began, self._now(), passing))

    def collect(self) -> None:
        """Bring the totals up to date."""
        if self._on_gpu and (self._laps or self._waits):
            torch.cuda.synchronize()
        for began, computed, ended in self._laps:
            self._traffic.own_seconds += self._seconds(began, computed)
            self._traffic.exposed_seconds += self._seconds(computed, ended)
        for began, ended, passing in self._waits:
            self._traffic.exposed_seconds += self._seconds(began, ended)
            self._traffic.own_seconds -= self._seconds(began, ended) if passing else 0.0
        self._laps.clear()
        self._waits.clear()

    def _all_computed(self) -> None:
        self._computed = self._now()
        self._last_wait.enter_context(phase("exchange"))

    def _seconds(self, start: Any, stop: Any) -> float:
        elapsed: float = start.elapsed_time(stop) / 1e3 if self._on_gpu else stop - start
        return elapsed


def _event() -> Any:
    make: Any = torch.cuda.Event  # published without types
    event = make(enable_timing=True)
    event.record()
    return event
