"""Preemption: on SIGTERM, all processes write a checkpoint of the same step and training ends.

A thread in whichever process got the signal announces it; a thread in every process answers with the step its process
has reached. When all have answered, the first process that got the signal names a step that none has completed, before
it takes part in that step itself; so every process learns the number in time. Without a signal, a step costs one look
at a variable.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from pipeline.system.errors import Evicted
from pipeline.system.processes import TERMINATED
from pipeline.system.torch_private import default_store
from train.process_group import ProcessGroup

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 3.0  # every living process answers within them, whatever its main thread is doing
_HANG_SECONDS = 3.0  # without progress, or two steps where they are longer
_SAME_SIGNAL_SECONDS = 0.5  # a signal to a launcher may reach its processes twice


class Preemption:
    """The main thread calls `is_due` after every step; everything else runs in a thread of its own."""

    def __init__(self, group: ProcessGroup, next_sync_step: Callable[[int], int], step: int) -> None:
        self._group, self._next_sync_step = group, next_sync_step
        self._store = _open_store(group)
        self._last_step = step  # the last one the main thread has completed
        self._last_step_time, self._step_seconds = time.monotonic(), 0.0
        self._announced = self._leads = self._signalled = False
        self._final_step: int | None = None
        self._signal_time = 0.0
        self._last_progress: tuple[object, float] = (None, 0.0)

    def is_due(self, step: int) -> bool:
        """Return whether training ends here, after `step` steps."""
        self._note_step(step)  # before the check: a later announcement must not be answered with an older step
        if not self._announced:
            return False
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()  # a step counts when its exchange is complete, not when it is launched
        if self._final_step is None:
            self._final_step = self._choose_step(step) if self._leads else self._read_step()
        assert self._final_step is None or step <= self._final_step, (
            f"step {step}: all were to end after {self._final_step}"
        )
        return self._final_step == step

    def due_at_barrier(self, step: int) -> bool:
        """Return the same for strategies that meet rarely; all processes take part."""
        self._note_step(step)
        return any(self._group.gather(self._signalled))

    def eviction_error(self, step: int) -> Evicted:
        """Return the error that ends training; all take part, so that every checkpoint is complete by then."""
        ranks = [str(rank) for rank, flag in enumerate(self._group.gather(self._signalled)) if flag]
        return Evicted(
            f"ended by SIGTERM (rank {', '.join(ranks)}); nothing is lost, there is a checkpoint of step {step}; "
            "to continue: pipe run --resume"
        )

    def serve(self, signals: int, stop: threading.Event) -> None:
        """Run in a thread; `signals` is a pipe from which signal numbers can be read."""
        try:
            while not stop.is_set():
                ready, _, _ = select.select([signals], [], [], _POLL_SECONDS)
                if ready and signal.SIGTERM in os.read(signals, 512):
                    self._announce()
                self._answer()
                if self._signalled and not stop.is_set():
                    self._end_if_others_hang()
        except RuntimeError as error:  # the store died with its process: the next exchange fails too
            if self._signalled and not stop.is_set():
                _end(f"the others cannot be reached ({error})")

    def _note_step(self, step: int) -> None:
        now = time.monotonic()
        self._step_seconds, self._last_step_time = now - self._last_step_time, now
        self._last_step = step

    def _announce(self) -> None:
        now = time.monotonic()
        if self._signalled and now - self._signal_time > _SAME_SIGNAL_SECONDS:
            _end("second SIGTERM")
        if not self._signalled:
            rank = str(self._group.rank.rank)
            self._signalled, self._signal_time = True, now
            self._leads = self._store.compare_set("signal", "", rank).decode() == rank

    def _answer(self) -> None:
        if not self._announced and (self._signalled or self._store.check(["signal"])):
            self._announced = True
            self._store.set(f"step-{self._group.rank.rank}", str(self._last_step))
            self._store.add("answers", 1)

    def _choose_step(self, step: int) -> int | None:
        """Return a step that no process has completed, once all have answered."""
        if not self._all_answered():
            return None
        steps = [int(self._store.get(f"step-{rank}")) for rank in range(self._group.size)]
        final = self._next_sync_step(max(step, *steps))
        self._store.set("step", str(final))
        return final

    def _read_step(self) -> int | None:
        return int(self._store.get("step")) if self._store.check(["step"]) else None

    def _all_answered(self) -> bool:
        return self._store.add("answers", 0) == self._group.size

    def _end_if_others_hang(self) -> None:
        """End this process at once where another one is dead or hangs."""
        now = time.monotonic()
        if now - self._signal_time > _ANSWER_SECONDS and not self._all_answered():
            _end("not all other processes answer")
        position = self._group.heartbeat.position
        if position is not self._last_progress[0]:
            self._last_progress = (position, now)
        is_saving = position[1] == "checkpoint"  # however long that takes: the sender of the signal sets the limit
        if not is_saving and now - self._last_progress[1] > max(_HANG_SECONDS, 2 * self._step_seconds):
            _end(f"no progress since step {position[0]}, {position[1]}")


@contextlib.contextmanager
def preemption_handler(group: ProcessGroup, next_sync_step: Callable[[int], int], step: int) -> Iterator[Preemption]:
    """Handle SIGTERM within; `next_sync_step(step)` is the next step at which all processes synchronize."""
    preemption, stop = Preemption(group, next_sync_step, step), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=preemption.serve, args=(reading, stop), name="preemption", daemon=True)
    # A Python handler would wait for the main thread, which may hang; the wake-up pipe is written to at once.
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    previous_handler: Any = signal.signal(signal.SIGTERM, lambda *_: None)
    thread.start()
    try:
        yield preemption
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        signal.set_wakeup_fd(previous_fd)
        stop.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


def _open_store(group: ProcessGroup) -> Store:
    """Return the store of the process group, over a connection of its own: another thread may block the first."""
    if group.size == 1:
        return HashStore()
    return PrefixStore("preemption", default_store().clone())


def _end(reason: str) -> None:
    print(f"SIGTERM: ending at once, {reason}", file=sys.stderr, flush=True)
    os._exit(TERMINATED)
