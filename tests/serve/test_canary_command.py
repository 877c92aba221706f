"""The comparison of two versions as a command, with real pods: small HTTP servers that answer `/metrics`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.canary import main

Start = Callable[..., str]


@contextmanager
def pod(failure_rate: float, key: str, address: tuple[str, int]) -> Iterator[int]:
    """Serve counters that have 2000 more requests at each reading."""
    readings: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            readings.append(2000)
            failed = int(sum(readings) * failure_rate)
            lines = [
                f'pipe_requests_total{{model="twice",code="{code}"}} {count}'
                for code, count in (("200", sum(readings) - failed), ("500", failed))
            ]
            self.send_response(200 if self.headers.get("x-api-key", "") == key else 401)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(address, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start pods; return `HOST:PORT`."""
    monkeypatch.setattr("pipeline.contract.canary.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    with ExitStack() as stack:

        def add(failure_rate: float = 0.0, key: str = "", host: str = "127.0.0.1", port: int = 0) -> str:
            return f"{host}:{stack.enter_context(pod(failure_rate, key, (host, port)))}"

        yield add


def compare(stable: str, canary: str, *options: str, minimum: int = 100) -> int:
    settings = [f"--min-requests={minimum}", "--margin=0.01", "--observe-seconds=1"]
    return main([f"--stable={stable}", f"--canary={canary}", "--name=twice", *settings, *options])


def test_a_good_canary_is_promoted_and_a_bad_one_is_not(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(start(), start()) == 0
    assert compare(start(), start(0.1)) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("canary: promote: failed: 0.00% compared with 0.00%")
    assert bad.startswith("canary: roll back: failed: 10.00% compared with 0.00%")


def test_all_pods_behind_a_name_are_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(start().rpartition(":")[2])
    start(0.1, host="127.0.0.2", port=port)
    resolve = socket.getaddrinfo

    def resolve_pods(host: str, *arguments: int, **options: int) -> list[object]:
        hosts = ["127.0.0.1", "127.0.0.2"] if host == "twice-canary" else [host]
        return [entry for name in hosts for entry in resolve(name, *arguments, **options)]

    stable = start()
    monkeypatch.setattr("socket.getaddrinfo", resolve_pods)
    assert compare(stable, f"twice-canary:{port}") == 1


@pytest.mark.parametrize("canary", ["stable", "127.0.0.1:1"])
def test_a_canary_without_pods_of_its_own_is_not_promoted(
    canary: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until DNS follows, the canary's name means the stable pods."""
    stable = start()
    assert compare(stable, stable if canary == "stable" else canary, minimum=0) == 1
    assert "inconclusive after 5 s: a version has no pod that answers" in capsys.readouterr().out


def test_metrics_are_read_with_the_api_key(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("sha256:0\n")
    stable, canary = start(key="secret"), start(key="secret")
    assert compare(stable, canary) == 1
    assert "GET /metrics returned 401" in capsys.readouterr().out
    assert compare(stable, canary, f"--api-keys={keys}") == 2
    assert "set PIPE_API_KEY to one of the keys" in capsys.readouterr().out
    monkeypatch.setenv("PIPE_API_KEY", "secret")
    assert compare(stable, canary, f"--api-keys={keys}") == 0
