from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.contract.bundle import Ancestors, Bundle, Manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.service.process import (
    LiveService,
    check_golden,
    free_port,
    measure_latency,
    port_is_free,
    process_started,
    read_live,
    send_request,
    service_environment,
    spawn,
    stop_process,
    wait_until_ready,
    write_live,
)
from pipeline.service.rollout import choose_ports
from pipeline.system.errors import PipelineError, ResourceError, StageError
from tests import ports

from ..records import live_service

WAITING = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def started(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    process = started(WAITING)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def live_of(process: subprocess.Popen[str], **changes: object) -> LiveService:
    return live_service(**{"pid": process.pid, "process_started": process_started(process.pid), **changes})


def test_a_record_is_read_as_it_was_written(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    assert read_live(tmp_path) is None
    write_live(tmp_path, live_of(process))
    assert read_live(tmp_path) == live_of(process)
    write_live(tmp_path, None)
    assert read_live(tmp_path) is None


def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text("{}")
    with pytest.raises(PipelineError, match=r"live\.json: damaged"):
        read_live(tmp_path)


def test_a_service_is_alive_as_long_as_its_process(process: subprocess.Popen[str]) -> None:
    live = live_of(process)
    states = [live.alive]
    process.kill()
    seen = psutil.Process(process.pid)
    deadline = time.monotonic() + 300
    while seen.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    states.append(live.alive)  # a zombie, because its parent did not wait for it
    process.wait(timeout=300)
    assert [*states, live.alive] == [True, False, False]


def test_another_process_with_the_same_pid_is_neither_alive_nor_ended(process: subprocess.Popen[str]) -> None:
    live = live_of(process, process_started=process_started(process.pid) - 60)
    assert not live.alive
    assert not stop_process(live.pid, live.process_started)
    assert process.poll() is None


def test_service_is_stopped_only_once(process: subprocess.Popen[str]) -> None:
    when = process_started(process.pid)
    assert stop_process(process.pid, when, grace_seconds=10)
    assert not psutil.pid_exists(process.pid)
    assert not stop_process(process.pid, when)


def test_service_that_ignores_sigterm_is_killed() -> None:
    with started(DEAF) as process:
        assert stop_process(process.pid, process_started(process.pid), grace_seconds=0.2)
        assert not psutil.pid_exists(process.pid)


def test_spawned_process_has_its_own_session_folder_and_files(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    program = (
        "import os; print(os.getsid(0) == os.getpid(), os.getcwd(), sorted(map(int, os.listdir('/proc/self/fd')))[:4])"
    )
    log = tmp_path / "logs" / "service.log"
    assert spawn(["-c", program], log, service_environment()).wait(timeout=300) == 0
    os.close(write_end)
    os.close(read_end)
    assert log.read_text() == "True / [0, 1, 2, 3]\n", "3 is the listing itself"


def test_service_does_not_inherit_variables_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPE_PARENT_WATCH", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = service_environment()
    assert found.keys().isdisjoint({"PIPE_PARENT_WATCH", "OMP_NUM_THREADS"})
    assert found["PYTHONSAFEPATH"] == "1"


def test_next_free_port_is_used_if_the_port_is_taken(taken: int) -> None:
    assert not port_is_free("127.0.0.1", taken)
    assert taken < free_port("127.0.0.1", taken) < taken + 100
    with pytest.raises(ResourceError, match=f"no free port between {taken} and {taken}"):
        free_port("127.0.0.1", taken, tries=1)


def test_redeployment_keeps_the_ports_of_the_old_process(process: subprocess.Popen[str]) -> None:
    old = live_of(process, port=9007, grpc_port=9008)
    request: Any = SimpleNamespace(host="127.0.0.1", port=9000)
    assert choose_ports(request, old) == (9007, 9008)


Answer = tuple[int, str, Any]  # status, bundle digest, body: None echoes the request, and text is sent unencoded
Serve = Callable[[dict[str, Answer]], int]
V1, V2 = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
TENSOR = {"outputs": [{"name": "y", "shape": [1, 1], "data": [2.0]}]}
GOOD: dict[str, Answer] = {V1: (200, "digest", {"predictions": [2.0]}), V2: (200, "digest", TENSOR)}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle with a golden request for the codec and one for the tensors."""
    one = np.ones((1, 1), np.float32)
    Golden({"x": one}, {"y": 2 * one}, [1.0], [2.0], rtol=1e-3, atol=1e-4).write(tmp_path)
    ancestors = Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx="e")
    manifest = Manifest(schema_version=1, name="tiny", verdict="pass", ancestors=ancestors, files={})
    signature = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 1)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 1)),),
        codec="C",
        limits=Limits(max_batch_size=1, max_body_bytes=1),
        runtime=Runtime(provider="cpu", threads=1),
    )
    return Bundle(tmp_path, "digest", manifest, signature)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a server with these answers by path."""
    started: list[tuple[HTTPServer, threading.Thread]] = []

    def start(answers: dict[str, Answer]) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received = self.rfile.read(int(self.headers["Content-Length"]))
                status, digest, body = answers[self.path]
                self.send_response(status)
                self.send_header("X-Bundle-Digest", digest)
                self.end_headers()
                sent = (
                    received if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
                )
                self.wfile.write(sent)

            def log_message(self, *args: object) -> None:
                """Write no access log."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server.server_port

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def test_requests_use_json_and_headers_are_lowercase(serve: Serve) -> None:
    port = serve({"/echo": (200, "digest", None), "/broken": (503, "", "not json")})
    status, headers, answer = send_request("127.0.0.1", port, "POST", "/echo", {"a": [1]})
    assert (status, headers["x-bundle-digest"], answer) == (200, "digest", {"a": [1]})
    assert send_request("127.0.0.1", port, "POST", "/broken", {})[::2] == (503, "not json")


def test_golden_answers_are_counted(serve: Serve, bundle: Bundle) -> None:
    assert check_golden("127.0.0.1", serve(GOOD), bundle) == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {V1: (200, "digest", {"predictions": [2.1]})},
            r"predictions\[0\]: expected 2.0, found 2.1; what is served is not",
        ),
        ({V2: (200, "digest", {"outputs": []})}, "the answer has no output y"),
        ({V1: (500, "digest", {"error": "no"})}, "answered 500: .*no"),
        ({V1: (200, "another", {"predictions": [2.0]})}, "answered by another bundle than digest"),
    ],
)
def test_a_wrong_answer_is_reported(serve: Serve, bundle: Bundle, wrong: dict[str, Answer], sentence: str) -> None:
    with pytest.raises(StageError, match=sentence):
        check_golden("127.0.0.1", serve(GOOD | wrong), bundle)


def test_latency_quantiles_are_measured(serve: Serve, bundle: Bundle) -> None:
    found = measure_latency("127.0.0.1", serve(GOOD), bundle)
    assert 0 < found["p50"] <= found["p95"] <= found["max"]
    assert found["requests"] == 50


def test_waiting_for_a_service_that_never_listens_times_out(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(StageError, match=r"was not ready within 0\.2 s"):
            wait_until_ready(process, ports.free_port(), tmp_path / "log", timeout_seconds=0.2)
    finally:
        process.kill()
        process.wait()
