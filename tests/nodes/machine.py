"""A machine for tests: a host of the test network with its own processes, mounts and host name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from benchmarks.network import Host

# The first process of a machine ends when its standard input is closed, and the kernel then kills all the others.
_INIT = "hostname $0; echo up; exec env --ignore-signal=CHLD cat"  # orphans are not waited for
_ENTER = 'cd "$0" && exec "$@"'  # from within: a folder that was opened outside shows the mounts there
_SECONDS = 300


class Machine:
    """A machine, which is off until it boots; it can be lost and boot again."""

    def __init__(self, host: Host) -> None:
        self.host, self.name = host, f"node{host.number}"
        self._power: subprocess.Popen[bytes] | None = None
        self._doors: list[subprocess.Popen[bytes]] = []

    @property
    def on(self) -> bool:
        return self._power is not None

    def boot(self) -> None:
        argv = ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "sh", "-c", _INIT, self.name]
        self._power = subprocess.Popen(
            self.host.argv(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare prints a warning when the machine is lost
        )
        assert self._power.stdout is not None
        assert self._power.stdout.readline() == b"up\n", f"{self.name} did not boot"

    def lose(self) -> None:
        """Power off: every process is killed at once."""
        if self._power is not None:
            self._init.kill()
            self._power.communicate(timeout=_SECONDS)
            self._power = None
        for door in self._doors:
            door.wait(timeout=_SECONDS)

    def start(
        self, argv: Sequence[str], folder: Path, env: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process here; return that of `nsenter`, which has its exit status and forwards no signals."""
        door = ["nsenter", f"--target={self._init.pid}", "--net", "--uts", "--mount", "--pid"]
        process = subprocess.Popen(
            [*door, "sh", "-c", _ENTER, str(folder), *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._doors.append(process)
        return process

    def do(self, *argv: str) -> None:
        """Run a short command, such as a mount, to its end."""
        with self.start(argv, Path("/"), os.environ, sys.stderr.buffer) as process:
            assert process.wait(timeout=_SECONDS) == 0, argv

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the processes whose command has all these words, oldest first."""
        if not self.on:
            return []
        here = _namespace(self._init)
        found = [one for one in psutil.process_iter() if _namespace(one) == here and {*words} <= {*_command(one)}]
        return sorted(found, key=lambda process: process.create_time())  # not by pid, which wraps around

    @property
    def _init(self) -> psutil.Process:
        assert self._power is not None, f"{self.name} is off"
        return psutil.Process(self._power.pid).children()[0]


def _namespace(process: psutil.Process) -> str:
    """Return the PID namespace of a process; empty if it has ended or belongs to another user."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except (FileNotFoundError, PermissionError):
        return ""


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
