"""Requests that are rejected by their headers: responses and counters."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from pipeline.contract.signature import Limits, Runtime
from tests.serve.special_models import slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from tests.serve.conftest import Launcher, Running


PATH, LONG, MOST = "/v2/models/tiny/infer", 100.0, 2
KEY = "a-key-of-more-than-16-characters"


def body(rounds: float = 0.0) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [rounds]}]}).encode()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, module_launcher: Launcher) -> Running:
    """A service with a key and a slow model, which runs one request at a time and lets two wait."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "keys").write_text(KEY + "\n")
    (folder / "keys").chmod(0o600)
    limits = Limits(max_batch_size=16, max_body_bytes=1 << 20, max_waiting=MOST)
    runtime = Runtime(provider="cpu", threads=1, batch_rows=1)
    return module_launcher(slow(folder / "bundle", limits, runtime), options=("--api-keys", str(folder / "keys")))


@pytest.fixture
def full(running: Running) -> Iterator[httpx.Client]:
    """A client of the service while its queue is full, and one request was refused already."""
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(base_url=running.url, headers=headers, timeout=300) as client,
        ThreadPoolExecutor(1 + MOST) as threads,
    ):
        sent: list[Future[httpx.Response]] = []
        while value(client, "pipe_queue_length") < MOST:
            missing = 1 + MOST - len(sent) + sum(one.done() for one in sent)
            sent += [threads.submit(client.post, PATH, content=body(LONG)) for _ in range(missing)]
            time.sleep(0.01)
        assert client.post(PATH, content=body()).status_code == 503
        yield client
        assert {one.result().status_code for one in sent} <= {200, 503}


def value(client: httpx.Client, name: str, label: str = "") -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)


def test_early_refusal_equals_that_of_the_application_and_is_counted(running: Running, full: httpx.Client) -> None:
    before = [value(full, "pipe_rejected_total", 'reason="busy"'), value(full, "pipe_requests_total", 'code="503"')]
    first, *more = [full.post(PATH, content=body(), headers={"x-request-id": f"r{one}"}) for one in range(5)]
    for number, answer in enumerate((first, *more)):
        assert answer.status_code == 503
        assert answer.json()["error"] == f"{MOST} requests wait already; try again in a moment"
        assert answer.headers["x-request-id"] == f"r{number}"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers.keys() == first.headers.keys()
        assert {"x-bundle-digest", "x-served-by", "cache-control", "x-content-type-options"} <= answer.headers.keys()
    after = [value(full, "pipe_rejected_total", 'reason="busy"'), value(full, "pipe_requests_total", 'code="503"')]
    assert after == [count + 5 for count in before]
    assert value(full, "pipe_requests_in_flight") <= 1 + MOST
    assert "code=503" in running.log or '"code": 503' in running.log


@pytest.mark.long
def test_body_after_the_refusal_is_discarded_and_the_connection_kept(running: Running, full: httpx.Client) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 300000\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as sock:
        for _ in range(2):
            sock.sendall(head)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert (answer.status, answer.will_close) == (503, False)
            assert b"requests wait already" in answer.read()
            sock.sendall(b"x" * 300_000)  # no JSON, which is not noticed
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 200


@pytest.mark.long
def test_pipelined_requests_are_refused_in_their_order(running: Running, full: httpx.Client) -> None:
    text = body()
    lines = f"authorization: Bearer {KEY}\r\ncontent-length: {len(text)}\r\n"
    sent = [f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-request-id: p{number}\r\n{lines}\r\n" for number in range(3)]
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as sock:
        sock.sendall(b"".join(head.encode() + text for head in sent))
        sock.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert found.count(b"HTTP/1.1 503 ") == 3
    places = [found.index(b"x-request-id: p%d" % number) for number in range(3)]
    assert places == sorted(places)


@pytest.mark.long
def test_other_errors_take_precedence_over_a_full_queue(full: httpx.Client) -> None:
    wrong: list[tuple[str, dict[str, str], int]] = [
        (PATH, {"authorization": "Bearer no one"}, 401),
        ("/v2/models/other/infer", {}, 404),
        (PATH + "/x", {}, 404),
        (PATH, {"x-request-timeout": "soon"}, 400),
    ]
    for path, headers, status in wrong:
        assert full.post(path, content=body(), headers=headers).status_code == status, (path, headers)


def test_requests_are_accepted_again_once_there_is_room(full: httpx.Client) -> None:
    end = time.monotonic() + 20
    while (answer := full.post(PATH, content=body())).status_code == 503:
        assert time.monotonic() < end
    assert answer.status_code == 200
