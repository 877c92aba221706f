"""A process that ends when the `pipe` command that started it is gone, even by `kill -9`.

The runner gives a step one end of a pair of sockets as standard input and holds the other; a step hands it on
to the processes it starts. When the runner dies the kernel closes its end and every process reads end-of-file.
The node of training holds a pair of its own for its launcher, so that the end of either ends the workers.
mpirun hands it on to its first process alone, gives the others the null device, and ends them with the first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

VARIABLE = "PIPE_LEASH"
EXIT_CODE = 143  # what a shell reports for SIGTERM


def hold(env: Mapping[str, str] | None = None) -> None:
    """Watch standard input in the background, but only when the runner asked for it."""
    env = os.environ if env is None else env
    if env.get(VARIABLE) == "1" and not os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        threading.Thread(target=_wait_and_exit, name="leash", daemon=True).start()


def _wait_and_exit() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EXIT_CODE)  # no clean-up: half-written outputs live under names nobody reads
