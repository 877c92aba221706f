from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.service import any_port
from pipeline.smoke import check_golden, last_lines, latency, wait_until_ready
from pipeline.spec.bundle import Ancestors, Bundle, Manifest
from pipeline.spec.errors import StageError
from pipeline.spec.golden import Golden
from pipeline.spec.signature import Limits, Runtime, Signature, TensorSpec

Answer = tuple[int, str, Any]  # status, bundle digest, body
Serve = Callable[[dict[str, Answer]], int]
V1, V2 = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
TENSOR = {"outputs": [{"name": "y", "shape": [1, 1], "data": [2.0]}]}
GOOD: dict[str, Answer] = {V1: (200, "digest", {"predictions": [2.0]}), V2: (200, "digest", TENSOR)}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """One golden request through the codec and one on tensors."""
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
    """A server that gives these answers by path."""
    started: list[tuple[HTTPServer, threading.Thread]] = []

    def start(answers: dict[str, Answer]) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, digest, body = answers[self.path]
                self.send_response(status)
                self.send_header("X-Bundle-Digest", digest)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: object) -> None:
                """Silent."""

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


def test_golden_answers_are_counted(serve: Serve, bundle: Bundle) -> None:
    assert check_golden("127.0.0.1", serve(GOOD), bundle) == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({V1: (200, "digest", {"predictions": [2.1]})}, r"predictions\[0\]: expected 2.0, found 2.1; what runs is not"),
        ({V2: (200, "digest", {"outputs": []})}, "the answer has no output y"),
        ({V1: (500, "digest", {"error": "no"})}, "answered 500: .*no"),
        ({V1: (200, "another", {"predictions": [2.0]})}, "answered by another bundle than digest"),
    ],
)
def test_a_wrong_answer_is_told(serve: Serve, bundle: Bundle, wrong: dict[str, Answer], sentence: str) -> None:
    with pytest.raises(StageError, match=sentence):
        check_golden("127.0.0.1", serve(GOOD | wrong), bundle)


def test_latency_is_what_a_client_sees(serve: Serve, bundle: Bundle) -> None:
    found = latency("127.0.0.1", serve(GOOD), bundle)
    assert 0 < found["p50"] <= found["p95"] <= found["max"]
    assert found["requests"] == 50


def test_a_service_that_ends_at_its_start_is_told_by_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\nno such model\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=20)
    with pytest.raises(StageError, match="the service ended at its start: two / three / no such model"):
        wait_until_ready(process, any_port(), log, timeout_seconds=20)


def test_a_service_that_never_listens_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(StageError, match=r"was not ready within 0\.2 s"):
            wait_until_ready(process, any_port(), tmp_path / "log", timeout_seconds=0.2)
    finally:
        process.kill()
        process.wait()


def test_a_log_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == "it left no log"
