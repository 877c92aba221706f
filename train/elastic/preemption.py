"""Told to end by SIGTERM: all processes make a checkpoint of the same step, then training is left.

A thread hears of it, in whichever process the signal came, and answers with the step its process has come to. When all
have answered, the first one that was told names a step none has made, before it takes part in it; so whoever has made
that step finds its number. Until somebody is told, a step costs one look at a variable.
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
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from pipeline.contract.errors import Evicted
from pipeline.contract.processes import TERMINATED
from train.process_group import Group

_LOOK_SECONDS = 0.25
_ANSWER_SECONDS = 3.0  # within which every living process hears of it, whatever its main thread is at
_STILL_SECONDS = 3.0  # without a move, or two steps where they are longer
_ONE_SIGNAL_SECONDS = 0.5  # what is sent to a launcher may reach its processes twice


class Preemption:
    """`due` is asked by the main thread after every step; all else happens in a thread of its own."""

    def __init__(self, group: Group, meeting_after: Callable[[int], int], step: int) -> None:
        self._group, self._meeting_after = group, meeting_after
        self._store = _open_store(group)
        self._passed = step  # after this step the main thread was here last
        self._passed_time, self._step_seconds = time.monotonic(), 0.0
        self._asked = self._leads = self._told = False
        self._at: int | None = None
        self._told_time = 0.0
        self._still: tuple[object, float] = (None, 0.0)

    def due(self, step: int) -> bool:
        """Whether all leave now that `step` steps are done."""
        self._note(step)  # before the look: who is asked later than that must not answer with an older step
        if not self._asked:
            return False
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()  # a step is made when its exchange is over, not when it is on its way
        if self._at is None:
            self._at = self._decide(step) if self._leads else self._find()
        assert self._at is None or step <= self._at, f"step {step}: all were to leave after {self._at}"
        return self._at == step

    def due_here(self, step: int) -> bool:
        """The same where all meet, which they seldom do: all take part in the look."""
        self._note(step)
        return any(self._group.gather(self._told))

    def farewell(self, step: int) -> Evicted:
        """All take part: nobody leaves before the checkpoint of the others is whole."""
        told = [str(rank) for rank, found in enumerate(self._group.gather(self._told)) if found]
        return Evicted(
            f"told to end by SIGTERM (rank {', '.join(told)}); nothing is lost, there is a checkpoint of step {step}: "
            "`pipe run --resume` goes on"
        )

    def serve(self, signals: int, done: threading.Event) -> None:
        """`signals` is where the numbers of signals can be read."""
        try:
            while not done.is_set():
                ready, _, _ = select.select([signals], [], [], _LOOK_SECONDS)
                if ready and signal.SIGTERM in os.read(signals, 512):
                    self._be_told()
                self._hear()
                if self._told and not done.is_set():
                    self._give_up_in_vain()
        except RuntimeError as error:  # the store is gone with its process: the next exchange tells of that
            if self._told and not done.is_set():
                _end(f"the others cannot be reached ({error})")

    def _note(self, step: int) -> None:
        now = time.monotonic()
        self._step_seconds, self._passed_time = now - self._passed_time, now
        self._passed = step

    def _be_told(self) -> None:
        now = time.monotonic()
        if self._told and now - self._told_time > _ONE_SIGNAL_SECONDS:
            _end("told twice")
        if not self._told:
            rank = str(self._group.rank.rank)
            self._told, self._told_time = True, now
            self._leads = self._store.compare_set("told", "", rank).decode() == rank

    def _hear(self) -> None:
        if not self._asked and (self._told or self._store.check(["told"])):
            self._asked = True
            self._store.set(f"passed-{self._group.rank.rank}", str(self._passed))
            self._store.add("answers", 1)

    def _decide(self, step: int) -> int | None:
        """A step that nobody has made yet, once all look out for it."""
        if not self._all_answered():
            return None
        passed = [int(self._store.get(f"passed-{rank}")) for rank in range(self._group.size)]
        found = self._meeting_after(max(step, *passed))
        self._store.set("step", str(found))
        return found

    def _find(self) -> int | None:
        return int(self._store.get("step")) if self._store.check(["step"]) else None

    def _all_answered(self) -> bool:
        return self._store.add("answers", 0) == self._group.size

    def _give_up_in_vain(self) -> None:
        """A process that is dead or hangs is waited for by nobody who was told to end."""
        now = time.monotonic()
        if now - self._told_time > _ANSWER_SECONDS and not self._all_answered():
            _end("not all other processes answer")
        position = self._group.watch.position
        if position is not self._still[0]:
            self._still = (position, now)
        saves = position[1] == "checkpoint"  # however long that takes; who told sets the limit
        if not saves and now - self._still[1] > max(_STILL_SECONDS, 2 * self._step_seconds):
            _end(f"nothing moves since step {position[0]}, {position[1]}")


@contextlib.contextmanager
def listening(group: Group, meeting_after: Callable[[int], int], step: int) -> Iterator[Preemption]:
    """Within, SIGTERM is heard. `meeting_after(step)` is the next step that nobody makes without all others."""
    leaving, done = Preemption(group, meeting_after, step), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=leaving.serve, args=(reading, done), name="leaving", daemon=True)
    # A handler in Python would wait for the main thread, which may hang; the pipe is written to at once.
    pipe_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before: Any = signal.signal(signal.SIGTERM, lambda *_: None)
    thread.start()
    try:
        yield leaving
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(pipe_before)
        done.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


def _open_store(group: Group) -> Store:
    """The one the processes met in, by a connection of its own: another thread may wait on theirs."""
    if group.size == 1:
        return HashStore()
    met: Any = dist.distributed_c10d._get_default_store()  # published without its methods
    return PrefixStore("leaving", met.clone())


def _end(why: str) -> None:
    print(f"told to end by SIGTERM: ends at once, {why}", file=sys.stderr, flush=True)
    os._exit(TERMINATED)
