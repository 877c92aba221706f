"""A contender's processes: started until the first right answer, held while others run, measured, ended."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import grpc
import psutil

from benchmarks.serve.load import RequestSpec
from benchmarks.serve.message import FRAME_BYTES
from pipeline.system.errors import StageError

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0


class Running:
    def __init__(self, name: str, argv: Sequence[str], log: IO[bytes]) -> None:
        self.name, self._log = name, log
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self.seconds_to_answer = 0.0

    def wait_for_answer(self, request_spec: RequestSpec) -> None:
        """Raise StageError with its last output if it does not come."""
        while not answers(request_spec):
            if self._process.poll() is not None or time.monotonic() - self.began > _START_SECONDS:
                raise StageError(f"{self.name} does not answer: {self._last_words()}")
            time.sleep(0.01)
        self.seconds_to_answer = time.monotonic() - self.began

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its running processes."""
        times = [process.cpu_times() for process in self._tree()]
        return sum(process_times.user + process_times.system for process_times in times)

    def memory_bytes(self) -> int:
        """Return the memory of its processes; shared pages count once."""
        return sum(process.memory_full_info().pss for process in self._tree())

    def hold(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        tree = self._tree()
        self.go_on()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-400:] or "no output"


def answers(request_spec: RequestSpec) -> bool:
    """Return whether a request gets a prediction: h2load does not see the status of gRPC."""
    return _answers_grpc(request_spec) if request_spec.grpc else _answers_http(request_spec)


def _answers_grpc(request_spec: RequestSpec) -> bool:
    target = urlsplit(request_spec.url)
    with grpc.insecure_channel(target.netloc) as channel:
        try:
            return bool(channel.unary_unary(target.path)(request_spec.body[FRAME_BYTES:], timeout=10))
        except grpc.RpcError:
            return False


def _answers_http(request_spec: RequestSpec) -> bool:
    target = urlsplit(request_spec.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=10)
    try:
        connection.request("POST", target.path, request_spec.body, dict(request_spec.headers))
        response = connection.getresponse()
        return response.status == 200 and len(response.read()) > 0
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_ports(count: int) -> list[int]:
    """Return distinct ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def log_file() -> IO[bytes]:
    return tempfile.TemporaryFile()  # closed by the caller that starts the process
