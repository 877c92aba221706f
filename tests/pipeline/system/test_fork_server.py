"""The fork server starts modules as `python -m` does, and survives killed clients and processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from pipeline.system import fork_server
from pipeline.system.fork_server import (
    ADDRESS_VARIABLE,
    ForkedProcess,
    Process,
    has_server,
    server_address,
    server_command,
    start_module,
)

SECONDS = 300
MODULE = """
import gc, json, os, sys, time
import numpy

def main(argv):
    facts = {
        "argv": sys.argv[1:], "given": argv, "folder": os.getcwd(), "env": dict(os.environ),
        "session": os.getsid(0), "pid": os.getpid(), "imported": numpy.imported, "random": numpy.random.seeded,
        "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
    }
    print(json.dumps(facts), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    if argv[0] == "wait":
        sys.stdin.read()
    if argv[0] == "raise":
        raise ValueError("an error of the module")
    return int(argv[1])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
NUMPY = """
import os
imported, seeded = os.getpid(), 0
class random:
    def seed():
        global seeded
        random.seeded = os.getpid()
    seeded = 0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a module, and a numpy that knows which process imported it and which one seeded it."""
    (tmp_path / "work.py").write_text(MODULE)
    (tmp_path / "numpy.py").write_text(NUMPY)
    return tmp_path


@contextlib.contextmanager
def running_server(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    path = root / "socket"
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        argv = [sys.executable, *server_command(listener, ["numpy"], ["missing", "work"])[1:]]
        server = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    with server:
        try:
            yield server, {**env, ADDRESS_VARIABLE: server_address(path, env)}
        finally:
            server.kill()


def start(root: Path, env: Mapping[str, str], *arguments: str, stdin: int | None = None) -> tuple[Process, Path]:
    """Start the module; return the file with its output, too."""
    output = root / "output"
    with open(os.devnull) as null, output.open("wb") as file:
        files = (null.fileno() if stdin is None else stdin, file.fileno(), file.fileno())
        return start_module("work", arguments, root, env, files), output


def lines_of(output: Path) -> list[str]:
    return output.read_text().splitlines()


def test_a_module_runs_as_by_python_m(root: Path) -> None:
    with running_server(root) as (server, env):
        process, output = start(root, {**env, "OWN": "ü\udcff", "EMPTY": ""}, "go", "3")
        assert isinstance(process, ForkedProcess)
        assert process.wait(SECONDS) == process.poll() == 3
        facts = json.loads(lines_of(output)[0])
    assert lines_of(output)[1:] == ["to stderr"]
    assert facts["argv"] == facts["given"] == ["go", "3"]
    assert (facts["folder"], facts["env"]["OWN"], facts["env"]["EMPTY"]) == (str(root), "ü\udcff", "")
    assert facts["pid"] == facts["session"] == process.pid
    assert facts["imported"] == server.pid  # once, for all processes
    assert facts["random"] == process.pid  # each draws its own numbers
    assert facts["collects"]  # the server does not, while it imports
    assert facts["frozen"] > 1000  # what the server imported, which a collection would copy


def test_forked_process_has_the_command_line_of_python_m(root: Path) -> None:
    with running_server(root) as (_, env):
        reading, writing = os.pipe()
        process, output = start(root, env, "wait", "0", stdin=reading)
        os.close(reading)
        while not lines_of(output):
            assert process.poll() is None
        command = psutil.Process(process.pid).cmdline()
        assert [word for word in command if word] == [sys.executable, "-m", "work", "wait", "0"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        os.close(writing)
        assert process.wait(SECONDS) == 0


def test_an_exception_of_the_module_is_printed(root: Path) -> None:
    with running_server(root) as (_, env):
        process, output = start(root, env, "raise", "0")
        assert process.wait(SECONDS) == 1
    assert lines_of(output)[-1] == "ValueError: an error of the module"


def test_several_processes_run_at_once_and_signals_reach_one(root: Path) -> None:
    with running_server(root) as (_, env):
        reading, writing = os.pipe()
        first, _ = start(root, env, "wait", "5", stdin=reading)
        second, _ = start(root, env, "wait", "6", stdin=reading)
        os.close(reading)
        second.send_signal(signal.SIGKILL)
        assert second.wait(SECONDS) == -signal.SIGKILL
        second.send_signal(signal.SIGKILL)  # too late
        assert first.poll() is None
        os.close(writing)
        assert first.wait(SECONDS) == 5


def test_processes_end_with_the_server(root: Path) -> None:
    with running_server(root) as (server, env):
        reading, writing = os.pipe()
        process, _ = start(root, env, "wait", "0", stdin=reading)
        server.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        os.close(reading)
        os.close(writing)


def test_the_server_ends_with_the_process_that_started_it(root: Path) -> None:
    with running_server(root) as (server, env):
        assert has_server(env)
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(SECONDS) == 0
        assert not has_server(env)


def test_without_a_server_python_starts_the_module(root: Path) -> None:
    with running_server(root) as (server, env):
        server.kill()
        server.wait()
        process, output = start(root, env, "go", "4")
        assert isinstance(process, subprocess.Popen)
        assert process.wait(SECONDS) == 4
    assert json.loads(lines_of(output)[0])["imported"] == process.pid


def test_another_thread_count_starts_a_new_process(root: Path) -> None:
    with running_server(root) as (_, env):
        process, _ = start(root, {**env, "OMP_NUM_THREADS": "2"}, "go", "0")
        assert isinstance(process, subprocess.Popen)
        assert process.wait(SECONDS) == 0


def test_the_end_of_a_process_is_seen_while_the_server_is_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_STATUS_SECONDS", 0.01)
    with running_server(root) as (server, env):
        reading, writing = os.pipe()
        process, _ = start(root, env, "wait", "7", stdin=reading)
        server.send_signal(signal.SIGSTOP)
        os.close(reading)
        os.close(writing)
        assert process.wait(SECONDS) == -signal.SIGKILL  # how it ended is not known


def test_stopped_server_is_bypassed_and_starts_nothing_later(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_START_SECONDS", 0.01)
    with running_server(root) as (server, env):
        server.send_signal(signal.SIGSTOP)
        process, output = start(root, env, "go", "4")
        assert isinstance(process, subprocess.Popen)
        assert process.wait(SECONDS) == 4
        server.send_signal(signal.SIGCONT)
        monkeypatch.setattr(fork_server, "_START_SECONDS", SECONDS)
        later, _ = start(root, env, "go", "5")
        assert isinstance(later, ForkedProcess)
        assert later.wait(SECONDS) == 5
        assert [line for line in lines_of(output) if line.startswith("{")] == lines_of(output)[:1]


def test_a_client_that_sends_nonsense_or_nothing_does_no_harm(root: Path) -> None:
    with running_server(root) as (_, env):
        path = env[ADDRESS_VARIABLE].partition(":")[2]
        for request in (b"", b"short", fork_server._NUMBER.pack(4) + b"none"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
        process, _ = start(root, env, "go", "2")
        assert process.wait(SECONDS) == 2


def test_threads_may_start_processes_at_once(root: Path) -> None:
    with running_server(root) as (_, env):
        statuses: list[int] = []

        def run(status: int) -> None:
            process, _ = start(root, env, "go", str(status))
            statuses.append(process.wait(SECONDS))

        threads = [threading.Thread(target=run, args=(status,)) for status in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == list(range(5))
