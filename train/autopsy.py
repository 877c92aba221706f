"""What can be learned of a process that stands still: its stacks, what the kernel says of it; and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from pathlib import Path

import psutil

_SAME_START_SECONDS = 1.0  # the kernel counts from boot, and when that was is a matter of the clock
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is held by a debugger",
    "D": "it waits in the kernel for a disk or a device",
    "Z": "it has ended",
}


class Tripwire:
    """The stacks of this process, written to `path` when nobody rearms: no interpreter is needed for that."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._file = path.open("w")

    def rearm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if os.fstat(self._file.fileno()).st_size:  # what was blocked has gone on
            self._file.seek(0)
            self._file.truncate()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def remove(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        self._path.unlink()


def stacks() -> str:
    """Of all threads of this process but the one that asks; the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(number, number)}, innermost call last:\n" + "".join(traceback.format_stack(frame))
        for number, frame in frames
        if number != own
    )


def why_silent(pid: int, started: float) -> str:
    """Why a process of this machine says nothing, as far as its kernel tells."""
    if _find(pid, started) is None:
        return "it has ended"
    return _STATES.get(kernel_state(pid)[:1], "its interpreter is blocked in native code")


def kernel_state(pid: int) -> str:
    """Such as `T (stopped), in do_signal_stop`, and where it may be read the kernel's own stack."""
    place, told = Path("/proc", str(pid)), ""
    with contextlib.suppress(OSError):
        lines = (place / "status").read_text().splitlines()
        told = next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
        told += f", in {(place / 'wchan').read_text()}"
        told += "\n" + (place / "stack").read_text().rstrip()
    return told


def put_down(pid: int, started: float) -> None:
    """SIGKILL for a process of this machine that answers nobody: its launcher would wait for it."""
    if (process := _find(pid, started)) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def process_start() -> float:
    """Together with its pid it tells this process from any other one."""
    return float(psutil.Process().create_time())


def _find(pid: int, started: float) -> psutil.Process | None:
    """None when the pid is free, or another process's by now."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < _SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return None
    return process if same else None
