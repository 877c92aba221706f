"""Chaos hooks: the points at which `pipe chaos` harms a training process.

Outside of `pipe chaos` no hook is installed, and passing a point costs one look at a global.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline.contract.chaos import ChaosEvent, ChaosLog, HookPoint, Kill
from train.process_group import ProcessGroup

_HOLD_SECONDS = 60.0  # how long a process waits for a kill from outside; after that, `pipe chaos` must be gone
_POLL_SECONDS = 0.002

_hook: Callable[[HookPoint], None] | None = None


def run_chaos_hook(point: HookPoint) -> None:
    """Mark that this process has reached `point`; an installed hook may kill it here."""
    if _hook is not None:
        _hook(point)


def install_chaos_hook(hook: Callable[[HookPoint], None] | None) -> None:
    global _hook
    _hook = hook


# Faults that a process survives, and the steps after which it has. Exchanges that do not use TCP survive a half-open
# connection; otherwise, others may end the step that they are in, and the next one, before they wait.
_LASTING = {"pause": 1, "clock": 1, "half-open": 3}
_now = time.time  # also after the clock was moved


class ChaosHook:
    """Harms this process at the first kill of the schedule that had not happened when the process started.

    After a fault that it survives, it goes on to the next one.
    """

    def __init__(self, folder: Path, group: ProcessGroup, kill: Callable[[], None] | None = None) -> None:
        self._log, self._heartbeat = ChaosLog(folder), group.heartbeat
        self._rank, self._size = group.rank.rank, group.size
        self._kill = kill or _kill_this_process
        self._born = _now()  # one clock for all processes of a machine
        self._steps = 0  # done when this process last reached the end of a step
        self._lock = threading.Lock()  # checkpoints are written by a thread
        self._kills = self._log.read_schedule()
        self._find_due()
        self._record("born")

    def __call__(self, point: HookPoint) -> None:
        with self._lock:
            if point == "step":
                self._count_step()
            fires = self._due is not None and self._steps > 0 and self._is_due(point, self._due)
            if fires and self._log.claim(self._number):
                self._record("kill")
                self._harm()
        if point == "step" and self._due is not None:
            self._wait_for_kill_from_outside(self._due)

    def _find_due(self) -> None:
        self._number = self._log.next_kill()
        self._due: Kill | None = self._kills[self._number] if self._number < len(self._kills) else None
        self._visits = 0  # of the point that is due, since its step
        self._steps_since = 0  # the fault

    def _harm(self) -> None:
        due = self._due
        assert due is not None
        if due.fault == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if due.fault == "clock":
            move_clock(due.seconds)
        elif due.fault == "half-open":
            drop_received_data()
        else:
            self._kill()

    def _count_step(self) -> None:
        first = self._steps == 0
        self._steps = self._heartbeat.position[0] + 1
        if first:
            self._record("step")
        elif self._due is not None and self._due.fault in _LASTING and self._log.is_claimed(self._number):
            self._steps_since += 1
            if self._steps_since == _LASTING[self._due.fault]:
                if self._due.rank % self._size == self._rank:
                    self._record("recovered")
                self._find_due()

    def _is_due(self, point: HookPoint, due: Kill) -> bool:
        if point != due.place or self._steps < due.step:
            return False
        self._visits += 1
        if due.rank % self._size == self._rank:
            return True
        # Not every process reaches every point of a checkpoint: any may take the kill at its second visit.
        return point != "step" and self._visits > 1

    def _wait_for_kill_from_outside(self, due: Kill) -> None:
        """Report that the kill may come, and do not train past `due.hold` before it has."""
        if due.place not in ("start", "moment") or self._rank != 0 or self._steps < due.step:
            return
        if self._visits == 0:
            self._visits = 1
            self._record("ready")
        until = time.monotonic() + _HOLD_SECONDS
        while self._steps >= due.hold and not self._log.is_claimed(self._number) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _record(self, event: str) -> None:
        body = {"event": event, "time": _now(), "number": self._number, "rank": self._rank, "pid": os.getpid()}
        body |= {"parent": os.getppid(), "born": self._born, "step": self._steps}
        self._log.append(ChaosEvent.model_validate(body))


def move_clock(seconds: float) -> None:
    """Move the clock of this process, as Python's `time` shows it; the machine's is that of others as well."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


_IP_MINTTL, _IPV6_MINHOPCOUNT = 21, 73  # of Linux; Python does not name them


def drop_received_data() -> None:
    """Let the kernel drop all that arrives over the TCP connections of this process: it came over too many routers."""
    for connection in psutil.net_connections("tcp"):
        if connection.pid == os.getpid() and connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(connection.fd)) as other:
                other.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, 255)  # packets leave with 64
                if other.family == socket.AF_INET6:
                    other.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, 255)


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # nothing may run until the kernel has acted
