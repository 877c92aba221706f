"""Start a Python module in milliseconds, by forking a process that has imported it: `start_module`.

The fork server imports modules once, and uses no GPU and no random number before it forks. It has no threads but those
of OpenBLAS and of memory allocators, which prepare themselves for a fork. What it starts has the environment, standard
files and name of `python -m MODULE`, and ends with it. Where there is no fork server, or one that began with other
variables that libraries read as they are loaded, the module is started in the usual way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

from pipeline.system.files import digest_mapping
from pipeline.system.torchvision_operators import declare_torchvision_operators

ADDRESS_VARIABLE = "PIPE_FORK_SERVER"  # the server's socket, and what it has in common with the processes it starts
THREADS_VARIABLE = "PIPE_THREADS"  # for a process that may use more threads of torch than its server
_READ_BY_LIBRARIES = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_")  # as they are loaded
_START_SECONDS = 30.0  # the server may still be importing
_STATUS_SECONDS = 15.0  # a stopped server does not report the end of a process, one that imports does so late
_REQUEST_SECONDS = 5.0
_LONGEST_COMMAND = 2000  # of a process that it starts; `ps` shows no more
_NUMBER = struct.Struct("!q")
_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """What `subprocess.Popen` and ForkedProcess have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


def start_module(
    module: str, arguments: Sequence[str], root: Path, env: Mapping[str, str], files: tuple[int, int, int]
) -> Process:
    """Start `python -m module arguments` with these standard files, in a session of its own."""
    argv = [sys.executable, "-m", module, *arguments]
    if server := _server_for(env):
        with contextlib.suppress(OSError, EOFError):  # it was killed, or does not answer
            return ForkedProcess(server, argv, root, env, files)
    stdin, stdout, stderr = files
    return subprocess.Popen(argv, cwd=root, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def server_address(path: Path, env: Mapping[str, str]) -> str:
    """Return the value of ADDRESS_VARIABLE for a server at this socket, started with this environment."""
    return f"{_common(env)}:{path}"


def _server_for(env: Mapping[str, str]) -> str:
    """Return the socket of the server that may start a process with this environment; empty: there is none."""
    common, _, path = env.get(ADDRESS_VARIABLE, "").partition(":")
    return path if common == _common(env) else ""


def has_server(env: Mapping[str, str]) -> bool:
    """Return whether a server listens that may start a process with this environment."""
    with socket.socket(socket.AF_UNIX) as connection:
        path = _server_for(env)
        return bool(path) and connection.connect_ex(path) == 0


def _common(env: Mapping[str, str]) -> str:
    return digest_mapping({name: value for name, value in env.items() if name.startswith(_READ_BY_LIBRARIES)})[:16]


class ForkedProcess:
    """A process that a fork server started for this one."""

    def __init__(
        self, server: str, argv: Sequence[str], root: Path, env: Mapping[str, str], files: tuple[int, int, int]
    ) -> None:
        request = json.dumps({"argv": list(argv), "root": str(root), "env": dict(env)}).encode()
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.settimeout(_START_SECONDS)
            self._connection.connect(server)
            socket.send_fds(self._connection, [_NUMBER.pack(len(request))], files)
            self._connection.sendall(request)
            self.pid = _receive_number(self._connection)
            self._handle = os.pidfd_open(self.pid)
            self._connection.sendall(b"!")  # until then it waits
        except BaseException:
            self._connection.close()
            raise

    def poll(self) -> int | None:
        return self._await_end(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._await_end(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def _await_end(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._handle], [], [], timeout)[0]:
            self.returncode = self._read_status()
            self._connection.close()
            os.close(self._handle)
        return self.returncode

    def _read_status(self) -> int:
        self._connection.settimeout(_STATUS_SECONDS)
        try:
            return _receive_number(self._connection)
        except (OSError, EOFError):  # the server was killed, and its processes with it; or it is stopped
            return -signal.SIGKILL


def _receive_number(connection: socket.socket) -> int:
    return int(_NUMBER.unpack(_receive(connection, _NUMBER.size))[0])


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class ForkServer:
    """Accepts requests at a listening socket until standard input ends: then the process that started it is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._pid = listener, os.getpid()
        self._selector = selectors.DefaultSelector()
        for file in (sys.stdin.fileno(), listener.fileno()):
            self._selector.register(file, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, socket.socket]] = {}  # number and client of each process, by its handle

    def serve(self, waits: bool = True) -> None:
        """Serve to the end; or only what waits already."""
        while ready := self._selector.select(None if waits else 0):
            for key, _ in ready:
                if key.fd == self._listener.fileno():
                    self._accept()
                elif key.fd in self._running:
                    self._reap(key.fd)
                else:  # the parent is gone
                    sys.exit()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_SECONDS)
        files: Sequence[int] = ()
        try:
            header, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
            request = json.loads(_receive(connection, *_NUMBER.unpack(header)))
            if (pid := os.fork()) == 0:
                self._become(connection, files, request)
            handle = os.pidfd_open(pid)
            self._running[handle] = pid, connection
            self._selector.register(handle, selectors.EVENT_READ)
            connection.sendall(_NUMBER.pack(pid))
        except (OSError, EOFError, ValueError, struct.error):  # the client is gone, or only tried the connection
            if all(client is not connection for _, client in self._running.values()):
                connection.close()
        finally:
            for file in files:
                os.close(file)

    def _reap(self, handle: int) -> None:
        pid, connection = self._running.pop(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(_NUMBER.pack(status))
        connection.close()
        self._selector.unregister(handle)
        os.close(handle)

    def _become(self, connection: socket.socket, files: Sequence[int], request: Mapping[str, Any]) -> NoReturn:
        """Be the new process, and end with the status of its module."""
        status = 1
        try:
            self._release()
            _end_with(self._pid)
            connection.settimeout(None)
            if connection.recv(1):
                connection.close()
                status = _run(request["argv"], request["root"], request["env"], files)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):  # where the disk is full, the status still counts
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _release(self) -> None:
        """Close what belongs to the server."""
        self._selector.close()
        self._listener.close()
        for handle, (_, client) in self._running.items():
            os.close(handle)
            client.close()


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when the server dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(argv: Sequence[str], root: str, env: Mapping[str, str], files: Sequence[int]) -> int:
    gc.freeze()  # otherwise a collection would copy all pages of the server
    gc.enable()
    os.setsid()
    os.chdir(root)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _rename(argv)
    if (torch := sys.modules.get("torch")) and THREADS_VARIABLE in env:
        torch.set_num_threads(int(env[THREADS_VARIABLE]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise the same in all processes
    _, _, module, *arguments = argv
    imported = _import(module)
    sys.argv = [str(imported.__file__), *arguments]
    return int(imported.main(arguments))


def _rename(argv: Sequence[str]) -> None:
    """Change the command that `ps` shows, in the memory where the arguments of this process lie."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(map(os.fsencode, argv))[: end - start]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _import(name: str) -> ModuleType:
    """Import a module; of a package, what `python -m` runs."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


def server_command(listener: socket.socket, first: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a server that imports modules, and serves what waits already after the first ones."""
    return ("python", "-m", __name__, str(listener.fileno()), *map(",".join, (first, others)), " " * _LONGEST_COMMAND)


def can_serve() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def main(argv: Sequence[str]) -> None:
    number, first, others, _ = argv
    _rename([sys.executable, "-m", "pipeline.system.fork_server"])  # without the names of what it starts
    with socket.socket(fileno=int(number)) as listener:
        server = ForkServer(listener)
        declare_torchvision_operators()
        gc.disable()  # nearly all that imports create stays, so that collections only take time
        for names in (first, others):
            for name in names.split(","):
                with contextlib.suppress(Exception):  # then it is missing or broken where it is used, too
                    _import(name)
            server.serve(waits=False)
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
