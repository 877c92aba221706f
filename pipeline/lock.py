"""One `pipe` at a time changes a runs directory; whoever comes second learns who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.spec.errors import ResourceError


@contextlib.contextmanager
def locked(runs: Path) -> Iterator[None]:
    """Held by the kernel as long as this process lives, so a killed owner leaves no stale lock."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ResourceError(f"{runs}: a file stands where the folder of runs belongs; move it away") from error
    path = runs / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResourceError(f"{runs}: {_owner(path)} is working here; wait for it or end it") from error
        file.truncate(0)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv[1:])}
        file.write(json.dumps(owner))
        file.flush()
        yield


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # caught between truncate and write
        return "another `pipe`"
    return f"`pipe {owner['command']}` (pid {owner['pid']} on {owner['host']})"
