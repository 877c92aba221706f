"""Running a step's process on this machine, on a leash, its output going straight to the log file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.spec import leash
from pipeline.spec.files import unwritable

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 45.0  # training makes a checkpoint first; torchrun gives it 30 s, and ends what hangs
_PARTING_SECONDS = 10.0
_END_BYTES = 1 << 16


@dataclass(frozen=True)
class LocalLauncher:
    """The other side of `pipeline.spec.leash`."""

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
        env={**os.environ, **env, leash.VARIABLE: "1"},
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
