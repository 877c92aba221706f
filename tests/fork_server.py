"""A fork server for tests: processes start with torch already imported, which saves seconds in each of them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import runpy
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

_PRELOADED = [
    "sklearn",  # before torch: its libraries look for threads at import
    "torch.utils.tensorboard.writer",
    "train.preload",  # with torch's compiler
    "train.parameter_server",
    "train.batch_size",
    "train.watchdog",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads must not fork


def fork_context() -> ForkServerContext:
    """Return the context of the server, which is started at first use with the environment of that moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ.update(_ONE_THREAD)
    return context


class ForkedProcess:
    """A forked process that runs `-m module …` or a program, with the interface of `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], folder: Path, env: Mapping[str, object], out: Path, err: Path) -> None:
        words = {name: str(value) for name, value in env.items()}
        self._out = out
        self.process = fork_context().Process(
            target=_run_in_child, args=(list(argv), str(folder), words, str(out), str(err))
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end and return the standard output."""
        self.wait(timeout)
        return self._out.read_text(), None

    def kill(self) -> None:
        self.process.kill()


def launch(
    argv: Sequence[str], folder: Path, processes: int, env: Mapping[str, str], seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes as torchrun does: when one fails, end the others."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    for path in (out, err):
        path.write_text("")
    job = {"TORCHELASTIC_RUN_ID": secrets.token_hex(4), "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    started = [
        ForkedProcess(argv, folder, {**env, **job, "RANK": rank, "LOCAL_RANK": rank}, out, err).process
        for rank in range(processes)
    ]
    status = _wait(started, time.monotonic() + seconds)
    return subprocess.CompletedProcess(list(argv), status, out.read_text(), err.read_text())


def _wait(processes: Sequence[BaseProcess], deadline: float) -> int:
    """Return the status of the process that failed first, or 0."""
    try:
        while time.monotonic() < deadline:
            codes = [process.exitcode for process in processes]
            if all(code == 0 for code in codes):
                return 0
            if failed := [code for code in codes if code]:
                return failed[0]
            multiprocessing.connection.wait(
                [process.sentinel for process in processes if process.exitcode is None], 0.5
            )
        raise TimeoutError("processes did not end in time")
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _run_in_child(argv: list[str], folder: str, env: dict[str, str], out: str, err: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, 1) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.environ.update(env)
    os.chdir(folder)
    if argv[0] == "-m":
        sys.argv = [argv[1], *argv[2:]]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path.insert(0, folder)
        runpy.run_path(argv[0], run_name="__main__")
