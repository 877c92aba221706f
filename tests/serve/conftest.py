"""Small sealed bundles, and the real service as a process on free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.bundle import Bundle, open_bundle
from tests.ports import free_port
from tests.serve.bundles import TRICKY, build, digits
from tests.serve.bundles import seal as seal_again
from tests.serve.doubling_model import (
    model,  # noqa: F401  # fixtures
    pool,  # noqa: F401  # fixtures
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def picture() -> list[list[int]]:
    grey: list[list[int]] = np.random.default_rng(5).integers(0, 17, (8, 8)).tolist()
    return grey


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]) -> Path:
    """A sealed bundle with the codec of the digits example."""
    source = (ROOT / "examples/digits/codec.py").read_text()
    return build(tmp_path_factory.mktemp("digits") / "bundle", "DigitsCodec", source, [picture, picture], digits)


@pytest.fixture(scope="session")
def other_path(tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]) -> Path:
    """The same with other weights, as from another training."""
    source = (ROOT / "examples/digits/codec.py").read_text()
    return build(tmp_path_factory.mktemp("other") / "bundle", "DigitsCodec", source, [picture, picture], digits, seed=8)


@pytest.fixture(scope="session")
def tricky_path(tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]) -> Path:
    """A sealed bundle whose codec waits or fails on request."""
    return build(
        tmp_path_factory.mktemp("tricky") / "bundle",
        "TrickyCodec",
        TRICKY,
        [{"image": picture}],
        lambda logits: [int(row.argmax()) for row in logits],
    )


@pytest.fixture(scope="session")
def bundle(bundle_path: Path) -> Bundle:
    return open_bundle(bundle_path)


@pytest.fixture
def own_bundle(bundle_path: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(bundle_path, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def seal() -> Callable[[Path], str]:
    """Seal a changed bundle again, like an attacker."""
    return seal_again


@dataclass
class Running:
    """A service process, and what it has printed."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int
    standby_port: int | None
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for(self, text: str, seconds: float = 300) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: text in self.log, seconds):
                raise AssertionError(f"the service never printed {text!r}:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(300)


def _free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    return _free_ports


class Launcher:
    """Starts services, and ends those that a test leaves running."""

    def __init__(self) -> None:
        self._started: list[tuple[Running, threading.Thread]] = []

    def __call__(
        self,
        bundle: Path,
        *,
        port: int = 0,
        grpc_port: int = 0,
        standby: bool = False,
        ready: bool = True,
        options: Sequence[str] = (),
    ) -> Running:
        free = _free_ports(3)
        port, grpc_port = port or free[0], grpc_port or free[1]
        standby_port = free[2] if standby else None
        argv = [sys.executable, "-m", "serve", str(bundle), "--port", str(port), "--grpc-port", str(grpc_port)]
        argv += ["--log-format", "text", *options]
        argv += ["--standby", str(standby_port)] if standby_port else []
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env)
        running = Running(process, port, grpc_port, standby_port)
        listener = threading.Thread(target=running.listen, daemon=True)
        listener.start()
        self._started.append((running, listener))
        if ready:
            running.wait_for("standby url=" if standby else "ready url=")
        return running

    def close(self) -> None:
        for running, listener in self._started:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()
            listener.join()
            assert running.process.stderr is not None
            running.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Launcher]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def server(bundle_path: Path) -> Iterator[Running]:
    """A service of the digits bundle, shared by tests that do not change it."""
    with contextlib.closing(Launcher()) as launcher:
        yield launcher(bundle_path)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server: Running) -> Iterator[Any]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def tricky_server(tricky_path: Path) -> Iterator[Running]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher(tricky_path)


@pytest.fixture(scope="module")
def module_launcher() -> Iterator[Launcher]:
    """Return a launcher for services that the tests of a module share."""
    with contextlib.closing(Launcher()) as launcher:
        yield launcher
