"""How the end of a process is told: by its exit status, as Python knows it."""

from __future__ import annotations

import signal

LEFT = 128 + signal.SIGTERM  # what a process that was asked to go exits with, as a shell reports it


def ending(who: str, status: int) -> str:
    """A negative status is the signal that ended it."""
    if status >= 0:
        return f"{who} exited with status {status}"
    known = -status in set(signal.Signals)
    name = signal.Signals(-status).name if known else f"signal {-status}"
    return f"{who} was killed ({name})" if -status == signal.SIGKILL else f"{who} was ended by {name}"


def asked_to_go(status: int) -> bool:
    """Whether it ended because somebody sent SIGTERM."""
    return status in (-signal.SIGTERM, LEFT)
