"""Which process a signal ended, as the launchers tell it in the log: such a process leaves no error of its own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.spec.failure import ending

_SHELL_SIGNALS = 128
MEMORY = (  # what to say of a process that was killed
    ", by hand or by the kernel because memory ran out; "
    "where it was memory, lower train.batch_size or raise train.accumulate"
)


class Killed(NamedTuple):
    rank: int
    host: str
    signal: int

    @property
    def briefly(self) -> str:
        return ending(f"rank {self.rank} on {self.host}", -self.signal)

    def __str__(self) -> str:
        more = MEMORY if self.signal == signal.SIGKILL else "; its last lines are in the log"
        return f"{self.briefly}{more}"


def killed_process(log: str) -> Killed | None:
    """The first process a signal ended by itself; the launcher then ends the others, which does not count."""
    found = [*_by_torchrun(log), *_by_mpirun(log), *_by_srun(log), *_by_horovodrun(log)]
    # A process that aborts may do so because it lost contact with the one that was killed.
    found.sort(key=lambda one: one.signal == signal.SIGABRT)
    return next((one for one in found if one.signal != signal.SIGTERM), None)


def _by_torchrun(log: str) -> Iterator[Killed]:
    """Its table of failures, the first one last."""
    entries = re.findall(r"^ +host +: (\S+)\n +rank +: (\d+) .*\n +exitcode +: -(\d+) ", log, re.MULTILINE)
    yield from (Killed(int(rank), host, int(number)) for host, rank, number in reversed(entries))


def _by_mpirun(log: str) -> Iterator[Killed]:
    for rank, host, number in re.findall(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)", log):
        yield Killed(int(rank), host, int(number))


def _by_srun(log: str) -> Iterator[Killed]:
    """It tells a signal by its description."""
    numbers = {signal.strsignal(number): number for number in signal.Signals}
    for host, rank, told in re.findall(r"srun: error: (\S+): tasks? (\d+)\S*: ([A-Z][a-z ]+)", log):
        if number := numbers.get(told.strip()):
            yield Killed(int(rank), host, int(number))


def _by_horovodrun(log: str) -> Iterator[Killed]:
    """It tells the status a shell gives for a signal, and no host: it starts processes on its own machine."""
    for rank, status in re.findall(r"^Process (\d+) exit with status code (\d+)", log, re.MULTILINE):
        if int(status) > _SHELL_SIGNALS:
            yield Killed(int(rank), "localhost", int(status) - _SHELL_SIGNALS)
