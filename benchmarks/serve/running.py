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

from benchmarks.serve.load import Asking
from benchmarks.serve.message import FRAME_BYTES
from pipeline.contract.errors import StageError

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

    def wait_for_answer(self, asking: Asking) -> None:
        """Raise StageError with its last output if it does not come."""
        while not answers(asking):
            if self._process.poll() is not None or time.monotonic() - self.began > _START_SECONDS:
                raise StageError(f"{self.name} does not answer: {self._last_words()}")
            time.sleep(0.01)
        self.seconds_to_answer = time.monotonic() - self.began

    def cpu_seconds(self) -> float:
        """Of all its processes together, those that ended left out."""
        times = [one.cpu_times() for one in self._tree()]
        return sum(one.user + one.system for one in times)

    def memory_bytes(self) -> int:
        """Pages that several of its processes share are counted once."""
        return sum(one.memory_full_info().pss for one in self._tree())

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
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for one in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-400:] or "no output"


def answers(asking: Asking) -> bool:
    """One request, and whether a prediction came back: h2load sees no status of gRPC, and would take any answer."""
    return _answers_grpc(asking) if asking.grpc else _answers_http(asking)


def _answers_grpc(asking: Asking) -> bool:
    place = urlsplit(asking.url)
    with grpc.insecure_channel(place.netloc) as channel:
        try:
            return bool(channel.unary_unary(place.path)(asking.body[FRAME_BYTES:], timeout=10))
        except grpc.RpcError:
            return False


def _answers_http(asking: Asking) -> bool:
    place = urlsplit(asking.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    try:
        connection.request("POST", place.path, asking.body, dict(asking.headers))
        answer = connection.getresponse()
        return answer.status == 200 and len(answer.read()) > 0
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_ports(count: int) -> list[int]:
    """Distinct, and free a moment ago."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def log_file() -> IO[bytes]:
    return tempfile.TemporaryFile()  # closed by the caller that starts the process
