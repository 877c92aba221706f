"""Why a step failed: its own error, the process of training that was killed, or its exit status."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.contract.run import Run
from pipeline.system.errors import (
    PipelineError,
    ResourceError,
    StageError,
    disk_full,
    missing_module_in_log,
    read_error,
)
from pipeline.system.processes import describe_exit

MEMORY_HINT = (
    ", by hand or by the kernel because memory ran out; "
    "where it was memory, lower train.batch_size or raise train.accumulate"
)
_SHELL_SIGNALS = 128  # a shell's exit status is this plus the signal's number


class KilledProcess(NamedTuple):
    rank: int
    host: str
    signal: int

    @property
    def summary(self) -> str:
        return describe_exit(f"rank {self.rank} on {self.host}", -self.signal)

    def __str__(self) -> str:
        more = MEMORY_HINT if self.signal == signal.SIGKILL else "; its last lines are in the log"
        return f"{self.summary}{more}"


def find_killed_process(log: str) -> KilledProcess | None:
    """Return the first process that a signal ended; SIGTERM is how the launcher then ends the others."""
    killed = [*_by_torchrun(log), *_by_mpirun(log), *_by_srun(log), *_by_horovodrun(log)]
    # A process may abort because it lost contact with the one that was killed.
    killed.sort(key=lambda process: process.signal == signal.SIGABRT)
    return next((process for process in killed if process.signal != signal.SIGTERM), None)


def _by_torchrun(log: str) -> Iterator[KilledProcess]:
    """Read torchrun's table of failures, which lists the first one last."""
    entries = re.findall(r"^ +host +: (\S+)\n +rank +: (\d+) .*\n +exitcode +: -(\d+) ", log, re.MULTILINE)
    yield from (KilledProcess(int(rank), host, int(number)) for host, rank, number in reversed(entries))


def _by_mpirun(log: str) -> Iterator[KilledProcess]:
    for rank, host, number in re.findall(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)", log):
        yield KilledProcess(int(rank), host, int(number))


def _by_srun(log: str) -> Iterator[KilledProcess]:
    """Read srun's messages, which describe the signal in words."""
    numbers = {signal.strsignal(number): number for number in signal.Signals}
    for host, rank, description in re.findall(r"srun: error: (\S+): tasks? (\d+)\S*: ([A-Z][a-z ]+)", log):
        if number := numbers.get(description.strip()):
            yield KilledProcess(int(rank), host, int(number))


def _by_horovodrun(log: str) -> Iterator[KilledProcess]:
    """Read horovodrun's messages: a shell's exit status and no host, as all processes run on its own machine."""
    for rank, status in re.findall(r"^Process (\d+) exit with status code (\d+)", log, re.MULTILINE):
        if int(status) > _SHELL_SIGNALS:
            yield KilledProcess(int(rank), "localhost", int(status) - _SHELL_SIGNALS)


_DISK_FULL_BYTES = 1 << 20


def find_failure(run: Run, step: str, status: int, log: str) -> PipelineError | None:
    """Return the cause of a failure, or None where the step succeeded.

    If only processes that lost contact with another one (`echo`) left an error, the cause is the killed one, which
    leaves none.
    """
    if status == 0:
        return _missing_model(run, step)
    error = read_error(run.partial(step))
    if (error is None or error.echo) and (killed := find_killed_process(log)):
        return StageError(f"{step}: {killed}")
    if error is None:
        error = missing_module_in_log(log)
    if error is not None:
        return type(error)(f"{step}: {error}")
    if shutil.disk_usage(run.path).free < _DISK_FULL_BYTES:
        return ResourceError(f"{step}: {disk_full(run.path, f'`pipe run --resume {run.id}`')}")
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return StageError(f"{step}: its process {ending} and left no reason; its output is in {run.log(step)}")


def _missing_model(run: Run, step: str) -> PipelineError | None:
    """Return the error of a machine that trained with others but has its own run directory, with no model in it."""
    if step != "train" or (run.partial(step) / "model.safetensors").is_file():
        return None
    return StageError(
        "train: this machine has no model, the first process ran on another one; all machines must share the run "
        "directory, and only one of them runs `pipe` (docs/training.md, Launching)"
    )
