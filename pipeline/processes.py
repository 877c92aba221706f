"""Running a step's process on this machine, on a leash, its output going straight to the log file.

Which process a signal ended, as the launchers tell it in the log: such a process leaves no error of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from pipeline.contract.files import unwritable
from pipeline.contract.processes import PARENT_WATCH_VARIABLE, ending

Say = Callable[[str], None]
Ask = Callable[[str], bool]

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 45.0  # training makes a checkpoint first; torchrun gives it 30 s, and ends what hangs
_PARTING_SECONDS = 10.0
_END_BYTES = 1 << 16


@dataclass(frozen=True)
class LocalLauncher:
    """The other side of `pipeline.contract.processes`."""

    root: Path
    tick: Callable[[], None]  # called ten times a second while a step runs
    grace_seconds: float = _GRACE_SECONDS  # to end in, when it is asked to

    def launch(self, argv: tuple[str, ...], log: Path, env: Mapping[str, str]) -> int:
        """Run to the end and return the exit status; on Ctrl-C the step is ended first."""
        with log.open("ab") as output, leashed(argv, self.root, env, output, self.grace_seconds) as process:
            while True:
                try:
                    return process.wait(timeout=_TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    self.tick()


@contextlib.contextmanager
def leashed(
    argv: tuple[str, ...], root: Path, env: Mapping[str, str], output: IO[Any], grace_seconds: float = _GRACE_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with the block, and by the kernel when we are gone; so are those it started."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        with_this_python(argv),
        cwd=root,
        env={**os.environ, **env, PARENT_WATCH_VARIABLE: "1"},
        stdin=theirs.fileno(),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone, and we decide
    )
    theirs.close()
    try:
        yield process
    finally:
        _end(process, grace_seconds)
        _part(ours)


def _part(ours: socket.socket) -> None:
    """Whoever of its children is left reads end-of-file and goes; when the last one is gone, so do we."""
    with ours, contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
        ours.settimeout(_PARTING_SECONDS)
        ours.recv(1)


def _end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Who is in a hurry asks again, by Ctrl-C."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=grace_seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare_log(log: Path) -> int:
    """A log that can be written; where this attempt's words will begin."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            return file.tell()
    except OSError as error:
        raise unwritable(log, error) from error


def said_since(log: Path, began: int) -> str:
    """The end of what a step wrote."""
    with log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - _END_BYTES))
        return file.read().decode(errors="replace")


def with_this_python(argv: tuple[str, ...]) -> list[str]:
    """`python -m`, which a launcher may stand before, or be, means the interpreter that runs us."""
    pairs = zip(argv, (*argv[1:], ""), strict=True)
    return [sys.executable if word == "python" and following in ("-m", "-c") else word for word, following in pairs]


def pod_environment() -> dict[str, str]:
    """Of a step in a pod; its threads are counted there."""
    environment = step_environment(1, 1)
    del environment["OMP_NUM_THREADS"]
    return environment


def step_environment(processes: int, cores: int) -> dict[str, str]:
    """What every step gets; threads are shared out so that processes do not fight for cores."""
    return {
        "PYTHONSAFEPATH": "1",  # a train.py in the project must not shadow ours
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # asked for by torch's deterministic algorithms
        "TOKENIZERS_PARALLELISM": "false",
    }


def count_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs a step would see, without importing torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


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
