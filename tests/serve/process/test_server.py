from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.quick import quick
from tests.serve import certificates
from tests.serve.load_clients import SECONDS, GrpcLoad, Load, wait_until

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


def _predict(running: Running, instance: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/models/tiny:predict", json={"instances": [instance]}, timeout=SECONDS)


def _in_flight(running: Running, count: int) -> None:
    """Wait until the service computes that many predictions."""
    with httpx.Client(base_url=running.url, timeout=SECONDS) as client:
        wait_until(lambda: f"\npipe_requests_in_flight {count}.0\n" in client.get("/metrics").text)


@pytest.fixture
def held(tmp_path: Path, picture: list[Any]) -> dict[str, Any]:
    """An instance whose prediction waits until the test opens its gate."""
    return {"image": picture, "gate": str(tmp_path / "gate")}


def test_a_slow_inference_delays_neither_health_nor_others(
    tricky_server: Running, held: dict[str, Any], picture: list[Any]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(_predict, tricky_server, held)
        try:
            _in_flight(tricky_server, 1)
            assert httpx.get(f"{tricky_server.url}/v2/health/live", timeout=SECONDS).status_code == 200
            assert _predict(tricky_server, {"image": picture}).status_code == 200
            assert not slow.done()
        finally:
            Path(held["gate"]).touch()
        assert slow.result().status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_readiness_at_once_and_accepted_requests_are_answered(
    start: Launcher,
    tricky_path: Path,
    held: dict[str, Any],
    number: signal.Signals,
    free_ports: Callable[[int], list[int]],
) -> None:
    (port,) = free_ports(1)
    running = start(tricky_path, options=("--health-port", str(port)))
    probe = f"http://127.0.0.1:{port}/v2/health"
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=running.url, timeout=SECONDS) as client:
        slow = pool.submit(_predict, running, held)
        try:
            _in_flight(running, 1)
            for url in ("/v2/health/ready", f"{probe}/ready", f"{probe}/live"):
                assert client.get(url).status_code == 200
            running.signal(number)
            running.wait_for("draining")
            response = client.get("/v2/health/ready")  # on the connection that is open already
            assert (response.status_code, response.json()["ready"]) == (503, False)
            assert response.headers["connection"] == "close"
            wait_until(lambda: client.get(f"{probe}/ready").status_code == 503)
            assert client.get(f"{probe}/live").status_code == 200
            assert not slow.done()
        finally:
            Path(held["gate"]).touch()
        assert slow.result().status_code == 200
    assert running.process.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_startup_ends_the_service(start: Launcher, bundle_path: Path, number: signal.Signals) -> None:
    running = start(bundle_path, ready=False)
    running.wait_for("starting model=")
    running.signal(number)
    assert (
        running.process.wait(SECONDS) == 128 + number
    )  # by a handler: without one, PID 1 of a container ignores the signal
    assert "Traceback" not in running.log


def test_second_signal_ends_the_service_at_once(start: Launcher, tricky_path: Path, held: dict[str, Any]) -> None:
    running = start(tricky_path)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(_predict, running, held)
        _in_flight(running, 1)
        running.signal(signal.SIGTERM)
        running.wait_for("draining")
        running.signal(signal.SIGTERM)
        assert running.process.wait(SECONDS) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            slow.result()


@pytest.mark.parametrize("connections", quick(["kept", "encrypted"], ["kept", "encrypted", "closed"]))
def test_shutdown_under_load_loses_no_accepted_request(
    start: Launcher, tricky_path: Path, tmp_path: Path, picture: list[Any], connections: str
) -> None:
    pair = certificates.make(tmp_path, "localhost")
    options = ["--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)]
    context = ssl.create_default_context(cafile=str(pair.certificate))
    tls = context if connections == "encrypted" else None
    running = start(tricky_path, options=options if tls else [])
    load = Load(running.port, {"instances": [{"image": picture}]}, keep_alive=connections != "closed", tls=tls)
    with load.running(clients=8):
        load.answers(200)
        running.signal(signal.SIGTERM)
        assert load.refused.wait(SECONDS)
    assert load.failures == []
    assert running.process.wait(SECONDS) == 0


def test_shutdown_answers_late_requests_of_connected_clients(
    start: Launcher, tricky_path: Path, picture: list[Any]
) -> None:
    running = start(tricky_path)
    body = json.dumps({"instances": [{"image": picture}]}).encode()
    head = b"POST /v1/models/tiny:predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with (
        socket.create_connection(("127.0.0.1", running.port), SECONDS) as silent,
        socket.create_connection(("127.0.0.1", running.port), SECONDS) as halfway,
        socket.create_connection(("127.0.0.1", running.port), SECONDS) as idle,
    ):
        idle.sendall(head + body)
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        halfway.sendall(head[:30])
        running.signal(signal.SIGTERM)
        assert idle.recv(4096) == b"", "connections that wait for no answer are closed"
        silent.sendall(head + body)
        halfway.sendall(head[30:] + body)
        for client in (silent, halfway):
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    assert running.process.wait(SECONDS) == 0


@pytest.mark.parametrize("keep_alive", quick([True], [False, True]))
def test_successor_takes_over_both_ports_under_load_without_a_gap(
    start: Launcher, tricky_path: Path, picture: list[Any], keep_alive: bool
) -> None:
    """Kept connections belong to the old process until a response announces `Connection: close`."""
    old = start(tricky_path)
    load = Load(old.port, {"instances": [{"image": picture}]}, keep_alive=keep_alive)
    calls = GrpcLoad(old.grpc_port, callers=4)
    with load.running(clients=4), calls.running(clients=4):
        load.answers(50)
        calls.answers(50)
        new = start(tricky_path, port=old.port, grpc_port=old.grpc_port, standby=True)
        pid = str(new.process.pid)
        standby = httpx.get(f"http://127.0.0.1:{new.standby_port}/v2/health/ready", timeout=SECONDS)
        assert (standby.status_code, standby.headers["x-served-by"]) == (200, pid)
        load.answers(20, by=str(old.process.pid))
        assert pid not in load.served_by | calls.served_by

        new.signal(signal.SIGUSR1)
        new.wait_for("ready url=")
        load.answers(50, by=str(old.process.pid) if keep_alive else pid)
        calls.answers(50)
        assert pid not in calls.served_by, "a connection stays open until the server drains it"
        assert old.stop() == 0
        load.answers(50, by=pid)
        calls.answers(50, by=pid)
        assert not load.refused.is_set() and not calls.refused.is_set()
        assert httpx.get(f"http://127.0.0.1:{new.standby_port}/", timeout=SECONDS).headers["x-served-by"] == pid
        new.signal(signal.SIGTERM)
        assert load.refused.wait(SECONDS) and calls.refused.wait(SECONDS)
    assert load.failures == calls.failures == []
    assert new.process.wait(SECONDS) == 0


def test_standby_without_a_takeover_signal_never_serves(start: Launcher, tricky_path: Path) -> None:
    running = start(tricky_path, standby=True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), SECONDS)
    assert running.stop() == 0
