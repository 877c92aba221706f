from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipeline.contract.bundle import open_bundle
from serve import limits as process_limits
from serve.limits import ProcessLimits
from serve.monitoring import metrics
from serve.monitoring.metrics import ModelMetrics, TokenMetrics, Tokens
from serve.monitoring.snapshot import Snapshot, VersionSnapshot, merge
from serve.options import parse_options, usable_cores
from serve.process.workers import Channel
from serve.shadow import Agreement
from tests.ports import free_port
from tests.quick import quick
from tests.serve.conftest import Launcher, Running
from tests.serve.load_clients import SECONDS, GrpcLoad, Load, wait_until


def _workers(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children()


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert alive == []


def _wait_for_workers(running: Running, count: int) -> None:
    wait_until(lambda: len(_workers(running)) >= count)


def _count(running: Running, sample: str) -> float:
    """Return the sum of one metric's samples; each request may meet another worker."""
    text = httpx.get(f"{running.url}/metrics", timeout=SECONDS).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{sample}{{"))


def test_workers_share_port_and_metrics_and_drain_together(
    start: Launcher, bundle_path: Path, picture: list[Any]
) -> None:
    running = start(bundle_path, options=("--workers", "3"))
    workers = _workers(running)
    assert len(workers) == 3
    load, rpc = Load(running.port, {"instances": [picture]}, keep_alive=False), GrpcLoad(running.grpc_port)
    with load.running(clients=4), rpc.running(clients=2):
        load.answers(60)
        rpc.answers(60)
        load._stop.set()
        rpc._stop.set()
    assert load.failures == rpc.failures == []
    assert load.served_by == rpc.served_by == {str(running.process.pid)}, "it is one service"
    for _ in range(5):  # whichever worker answers
        assert _count(running, "pipe_requests_total") == len(load.heard) + len(rpc.heard)
    assert running.stop() == 0
    _wait_until_gone(workers)
    for state in ("ready", "draining", "stopped"):
        assert running.log.count(f" {state} ") == 1


def test_a_killed_worker_is_replaced_and_only_its_own_requests_end(
    start: Launcher, bundle_path: Path, picture: list[Any]
) -> None:
    running = start(bundle_path, options=("--workers", "2"))
    before = _workers(running)
    load = Load(running.port, {"instances": [picture]}, keep_alive=False)
    with load.running(clients=2):
        load.answers(20)
        counted = _count(running, "pipe_requests_total")
        os.kill(before[0].pid, signal.SIGKILL)
        running.wait_for("a worker died and is replaced")
        load.answers(20)
        _wait_for_workers(running, 2)
        assert _count(running, "pipe_requests_total") >= counted, "a counter never decreases"
    assert len(load.failures) <= 2, "at most one request of each client was with that worker"
    assert not load.refused.is_set()
    assert running.stop() == 0


def test_workers_end_with_a_killed_supervisor(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=("--workers", "2"))
    workers = _workers(running)
    running.signal(signal.SIGKILL)
    _wait_until_gone(workers)


def test_repeatedly_dying_worker_ends_the_service(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=("--workers", "2"))
    deadline = time.monotonic() + SECONDS
    while running.process.poll() is None:
        assert time.monotonic() < deadline
        try:
            for worker in _workers(running):
                worker.kill()
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.01)
    assert running.process.wait(SECONDS) == 128 + signal.SIGKILL


def test_bundle_that_cannot_be_loaded_ends_the_service(start: Launcher, own_bundle: Path) -> None:
    (own_bundle / "model.onnx").write_bytes(b"damaged")
    for threads in ("1", "2"):  # loaded by the supervisor, and by each worker
        running = start(own_bundle, options=("--workers", "2", "--threads", threads), ready=False)
        assert running.process.wait(SECONDS) == 2
        assert "Traceback" not in running.log


def test_models_with_threads_are_loaded_by_each_worker(start: Launcher, bundle_path: Path, picture: list[Any]) -> None:
    running = start(bundle_path, options=("--workers", "2", "--threads", "2"))
    answer = httpx.post(f"{running.url}/v1/models/tiny:predict", json={"instances": [picture]}, timeout=SECONDS)
    assert answer.status_code == 200
    assert running.stop() == 0


@pytest.mark.parametrize("keep_alive", quick([True], [True, False]))
def test_services_with_other_worker_counts_take_over_without_a_gap(
    start: Launcher, bundle_path: Path, picture: list[Any], keep_alive: bool
) -> None:
    running = start(bundle_path)
    load = Load(running.port, {"instances": [picture]}, keep_alive=keep_alive)
    rpc = GrpcLoad(running.grpc_port)
    with load.running(clients=4), rpc.running(clients=2):
        load.answers(20)
        for workers in ("2", "3", "1"):
            new = start(
                bundle_path,
                port=running.port,
                grpc_port=running.grpc_port,
                standby=True,
                options=("--workers", workers),
            )
            pid = str(new.process.pid)
            standby = httpx.get(f"http://127.0.0.1:{new.standby_port}/v2/health/ready", timeout=SECONDS)
            assert (standby.status_code, standby.headers["x-served-by"]) == (200, pid)
            new.signal(signal.SIGUSR1)
            new.wait_for("ready url=")
            if not keep_alive:
                load.answers(20, by=pid)
            assert running.stop() == 0
            load.answers(20, by=pid)
            rpc.answers(20, by=pid)
            running = new
    assert load.failures == rpc.failures == []
    assert not load.refused.is_set() and not rpc.refused.is_set()


def test_limits_are_divided_among_workers(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(bundle_path)
    limits = parse_options(["b", "--workers", "4"]).open(bundle_path).signature.limits
    assert limits.max_waiting == bundle.signature.limits.max_waiting // 4
    limits = parse_options(["b", "--workers", "4", "--max-waiting", "2"]).open(bundle_path).signature.limits
    assert limits.max_waiting == 1
    monkeypatch.setattr(process_limits, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(process_limits, "resident_memory", lambda: 0)
    whole, part, least = (asdict(ProcessLimits.of_each(workers)) for workers in (1, 4, 10_000))
    assert (whole["request_bytes"], part["request_bytes"]) == (int(0.4 * (1 << 30)), int(0.1 * (1 << 30)))
    assert all(part[name] < whole[name] for name in whole)
    assert (part["http_connections"], part["grpc_connections"]) == (
        whole["http_connections"] // 4,
        whole["grpc_connections"] // 4,
    )
    assert (least["connection_bytes"], least["http_connections"]) == (8 << 20, 1), "a process must be able to work"


def test_threads_are_divided_among_workers(bundle_path: Path, tmp_path: Path) -> None:
    cores = usable_cores()
    options = parse_options(["b", "--workers", "auto", "--threads", "0"])
    assert options.workers == cores
    assert cores == 1 or options.open(bundle_path).signature.runtime.threads == 1
    options = parse_options(["b", "--workers", "2", "--threads", "3"])
    assert options.open(bundle_path).signature.runtime.threads == 3
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == len(os.sched_getaffinity(0))


@pytest.mark.long
def test_all_workers_and_their_replacements_have_the_same_roles(
    start: Launcher, bundle_path: Path, other_path: Path
) -> None:
    health = free_port()
    options = (f"tiny={other_path}", "--workers", "3", "--health-port", str(health), "--shadow", str(bundle_path))
    running = start(bundle_path, options=options)
    first, second = (open_bundle(path).digest for path in (bundle_path, other_path))

    def status() -> Any:
        return httpx.get(f"http://127.0.0.1:{health}/status", timeout=SECONDS).json()["models"]["tiny"]

    assert _digests(running) == {second}
    before = status()
    assert before["versions"] == {"1": {"bundle": first}, "2": {"bundle": second}}
    _workers(running)[0].kill()
    running.wait_for("a worker died and is replaced")
    _wait_for_workers(running, 3)
    assert _digests(running) == {second}
    assert status()["versions"] == before["versions"]
    _digests(running, path="infer")
    wait_until(lambda: status()["shadow"]["same"] + status()["shadow"]["other"] >= 30)
    assert status()["shadow"]["bundle"] == first
    assert running.stop() == 0


def _digests(running: Running, path: str = "") -> set[str]:
    """Return the bundles behind the answers to 30 requests, each on a connection of its own."""
    url, tensor = f"{running.url}/v2/models/tiny", {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32"}
    body = {"inputs": [{**tensor, "data": [0.5] * 64}]}
    answers = [
        httpx.post(f"{url}/{path}", json=body, timeout=SECONDS) if path else httpx.get(url, timeout=SECONDS)
        for _ in range(30)
    ]
    assert {answer.status_code for answer in answers} == {200}
    return {answer.headers["x-bundle-digest"] for answer in answers}


def test_connections_are_distributed_evenly_and_metrics_summed(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=("--workers", "3"))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(30)]
        for client in clients:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        public = [
            [one for one in worker.connections("tcp") if one.laddr.port == running.port] for worker in _workers(running)
        ]
        assert [len(connections) for connections in public] == [10, 10, 10]
    _digests(running, path="infer")
    for _ in range(3):
        statistics = httpx.get(f"{running.url}/v2/models/tiny/stats", timeout=SECONDS).json()
        assert statistics["model_stats"][0]["inference_count"] == 30
    assert running.stop() == 0


@pytest.mark.long
def test_health_port_answers_while_every_worker_is_stuck(start: Launcher, bundle_path: Path) -> None:
    port = free_port()
    running = start(bundle_path, options=("--workers", "2", "--health-port", str(port)))
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=SECONDS).status_code == 200
    for worker in _workers(running):
        worker.suspend()
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=SECONDS).json() == {"live": True}
    wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=SECONDS).status_code == 503)
    for worker in _workers(running):
        worker.resume()
    assert running.stop() == 0


def test_surplus_connections_wait_for_a_busy_worker(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=("--workers", "2"))
    workers = _workers(running)
    for worker in workers:
        worker.suspend()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(1500)]
        for client in clients:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        for worker in workers:
            worker.resume()
        for client in clients:
            client.settimeout(SECONDS)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
    assert running.stop() == 0


def test_metrics_of_processes_are_merged_by_their_meaning() -> None:
    def snapshot(requests: int) -> Snapshot:
        metrics = ModelMetrics()
        for _ in range(requests):
            metrics.record_request("v2", 200, 0.25, (1.0, 1.1, 1.2, 1.3, 1.4))
        metrics.record_batch(requests, 8 * requests, 0.5)
        tokens = Tokens(TokenMetrics(), 1, 2, 3, 4, 5)
        tokens.metrics.record_token(2.0, 1.0, 0.0)
        shadow = Agreement(same=requests, max_difference=requests)
        version = VersionSnapshot(
            "m", "1", "d", "pass", "cpu", True, False, True, requests, metrics, ("2", 0.1), shadow, "d", tokens
        )
        sent: Snapshot = pickle.loads(pickle.dumps(Snapshot({("m", "1"): version}, in_flight=requests)))
        return sent

    first = snapshot(1)
    total = merge([first, snapshot(2)])
    version = total.versions["m", "1"]
    assert version.metrics.requests == {("v2", 200): 3}
    seconds = version.metrics.seconds["v2"]
    assert (seconds.count, seconds.total, seconds.bounds) == (3, 0.75, metrics.SECONDS)
    assert version.metrics.batch_sizes == {8: [1, 0.5], 16: [1, 0.5]}
    assert (version.waiting, total.in_flight, version.canary) == (3, 3, ("2", 0.1))
    assert (version.shadow, version.shadow_digest) == (Agreement(same=3, max_difference=2), "d")
    assert version.tokens is not None
    assert (version.tokens.metrics.tokens_out, version.tokens.running, version.tokens.max_cache_bytes) == (2, 2, 8)
    assert first.in_flight == 1, "what was added up is unchanged"
    total.end()
    assert (version.metrics.requests["v2", 200], version.waiting, total.in_flight) == (3, 0, 0)


def test_adding_up_changes_none_of_the_snapshots() -> None:
    """That of a worker which does not answer counts again the next time."""
    snapshots = [Snapshot() for _ in range(3)]
    for snapshot in snapshots[1:]:
        snapshot.no_model.record_request("grpc", "OK", 0.25)
        snapshot.no_model.flush()
    for _ in range(2):
        assert merge(snapshots).no_model.seconds["grpc"].count == 2


def test_call_that_fails_or_gets_no_answer_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("a fault of the worker")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def answer() -> str:
        return "as ever"

    async def calls() -> list[Any]:
        here, there = (Channel(sock, {"fail": fail, "hang": hang, "answer": answer}) for sock in socket.socketpair())
        for channel in (here, there):
            await channel.open()
        running = [asyncio.create_task(channel.run()) for channel in (here, there)]
        answers = [
            await here.call("fail", seconds=SECONDS),
            await here.call("hang", seconds=0.01),
            await here.call("answer", seconds=SECONDS),
        ]
        here._writer.close()
        await asyncio.gather(*running)
        return answers

    assert asyncio.run(calls()) == [None, None, "as ever"]
    gc.collect()
    assert "a fault of the worker" in caplog.text
