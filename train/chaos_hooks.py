"""The trap that `pipe chaos` sets in a training process: at the place that is due it ends itself by kill -9.

The places where `pipe chaos` kills a training process; outside of it, passing one costs a look at a global.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pipeline.contract.attempts import ChaosEvent, Kill, Record, now
from train.process_group import Group

_HOLD_SECONDS = 60.0  # for a kill from outside; then whoever should have made it is gone
_POLL_SECONDS = 0.002


class Trap:
    """Knows one kill, the first that was not made when this process was born: each costs a process its life."""

    def __init__(self, folder: Path, group: Group, die: Callable[[], None] | None = None) -> None:
        self._record, self._watch = Record(folder), group.watch
        self._rank, self._size = group.rank.rank, group.size
        self._die = die or _kill_this_process
        self._born = now()
        self._steps = 0  # done when this process last stood at a step's end
        self._visits = 0  # of the place that is due, since its step
        self._lock = threading.Lock()  # checkpoints are written by a thread
        self._number = self._record.next()
        kills = self._record.kills()
        self._due: Kill | None = kills[self._number] if self._number < len(kills) else None
        self._tell("born")

    def __call__(self, place: Place) -> None:
        with self._lock:
            if place == "step":
                self._count()
            fires = self._due is not None and self._steps > 0 and self._is_due(place, self._due)
            if fires and self._record.claim(self._number):
                self._tell("kill")
                self._die()
        if place == "step" and self._due is not None:
            self._wait_for_outside(self._due)

    def _count(self) -> None:
        first = self._steps == 0
        self._steps = self._watch.position[0] + 1
        if first:
            self._tell("step")

    def _is_due(self, place: Place, due: Kill) -> bool:
        if place != due.place or self._steps < due.step:
            return False
        self._visits += 1
        if due.rank % self._size == self._rank:
            return True
        # Not every process comes to every place of a checkpoint: the chosen one is given one more.
        return place != "step" and self._visits > 1

    def _wait_for_outside(self, due: Kill) -> None:
        """Say that a kill from outside may come, and do not run away from it."""
        if due.place not in ("start", "moment") or self._rank != 0 or self._steps < due.step:
            return
        if self._visits == 0:
            self._visits = 1
            self._tell("ready")
        until = time.monotonic() + _HOLD_SECONDS
        while self._steps >= due.hold and not self._record.claimed(self._number) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _tell(self, event: str) -> None:
        body = {"event": event, "time": now(), "number": self._number, "rank": self._rank, "pid": os.getpid()}
        body |= {"parent": os.getppid(), "born": self._born, "step": self._steps}
        self._record.tell(ChaosEvent.model_validate(body))


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # nothing must happen in the moment that the kernel takes


Place = Literal["step", "ledger", "write", "rename", "renamed"]

_armed: Callable[[Place], None] | None = None


def reached(place: Place) -> None:
    """This process is about to go on from `place`, or never will."""
    if _armed is not None:
        _armed(place)


def arm(trap: Callable[[Place], None] | None) -> None:
    """`trap` is called at every place from here on."""
    global _armed
    _armed = trap
