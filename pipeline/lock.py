"""Who may change a runs directory: one `pipe` at a time, or several searches; whoever comes second learns who holds it.

All locks are the kernel's, held as long as the process lives, so a killed owner leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from pipeline.spec.errors import ResourceError

_POLL_SECONDS = 0.2


@contextlib.contextmanager
def locked(runs: Path, shared: bool = False, told: Callable[[str], None] | None = None) -> Iterator[None]:
    """Alone, or `shared` with others that only add runs of their own, as the trials of `pipe tune` do.

    Who holds it is an error; or `told`, and then waited for.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ResourceError(f"{runs}: a file stands where the folder of runs belongs; move it away") from error
    path = runs / ".lock"
    held = take(path, shared)
    if held is None and told is None:
        raise ResourceError(f"{runs}: {owner_of(path)} is working here; wait for it or end it")
    if held is None and told is not None:
        told(f"{owner_of(path)} is working here; waiting for it")
    while held is None:
        time.sleep(_POLL_SECONDS)
        held = take(path, shared)
    with held:
        yield


@contextlib.contextmanager
def waited(path: Path) -> Iterator[None]:
    """For work of a moment: whoever comes second waits."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take(path: Path, shared: bool = False) -> Held | None:
    """A lock that is held until it is closed or this process ends; None while somebody else has it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return Held(file)


class Held:
    """The owner's name stands in the file as long as it is held."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv[1:])}
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if not self._file.closed:
            self._file.truncate(0)  # of several that share it, the last to come may be the first to go
            self._file.close()


def owner_of(path: Path) -> str:
    """Who holds a lock, as far as the file tells."""
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # caught between truncate and write
        return "another `pipe`"
    return f"`pipe {owner['command']}` (pid {owner['pid']} on {owner['host']})"
