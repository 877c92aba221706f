"""Requests that wait while the model of a real service is busy."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.signature import Limits, Runtime
from tests.serve.odd import slow

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


LONG, SHORT = 100.0, 0.0  # thousands of rounds of work
MOST = 1 << 20  # bytes of a body
PATH = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, module_launcher: Launcher) -> Running:
    """A service with a slow model: one request at a time, a queue of three, a deadline of 10 s."""
    limits = Limits(max_batch_size=16, max_body_bytes=MOST, max_waiting=3, deadline_seconds=10)
    runtime = Runtime(provider="cpu", threads=1, batch_rows=1)
    return module_launcher(slow(tmp_path_factory.mktemp("slow") / "bundle", limits, runtime))


@pytest.fixture
def service(busy: Running) -> Iterator[Service]:
    with (
        ThreadPoolExecutor(8) as threads,
        httpx.Client(base_url=busy.url, timeout=60) as client,
        grpc.insecure_channel(f"127.0.0.1:{busy.grpc_port}") as channel,
    ):
        yield Service(busy, threads, client, GRPCInferenceServiceStub(channel))


class Service:
    def __init__(self, running: Running, threads: ThreadPoolExecutor, client: httpx.Client, stub: Any) -> None:
        self.running, self.threads, self.client, self.stub = running, threads, client, stub

    def request(self, rounds: float, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.client.post(PATH, content=body(rounds, **fields), headers=headers or {})

    def begin(self, rounds: float) -> Future[httpx.Response]:
        """Start a request and wait until it runs."""
        future = self.threads.submit(self.request, rounds)
        self.wait_until(lambda: self.value("pipe_requests_in_flight") == 1 and self.value("pipe_queue_length") == 0)
        return future

    def value(self, name: str, label: str = "") -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == name and label in line
        )

    def wait_until(self, condition: Any) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    @property
    def computed(self) -> float:
        return self.value("pipe_batch_requests_count")


def body(rounds: float, **fields: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [rounds]}], **fields}
    ).encode()


def message(rounds: float, **parameters: Any) -> Any:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32"}
    raw = np.float32(rounds).tobytes()
    return pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[raw], parameters=parameters)


def test_disconnected_client_is_not_computed(service: Service) -> None:
    before, gone = service.computed, service.value("pipe_rejected_total", 'reason="gone"')
    first = service.begin(LONG)
    with socket.create_connection(("127.0.0.1", service.running.port)) as sock:
        text = body(LONG)
        sock.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
        service.wait_until(lambda: service.value("pipe_queue_length") == 1)
    assert first.result().status_code == 200
    assert service.request(SHORT).status_code == 200
    assert service.computed - before == 2
    assert service.value("pipe_rejected_total", 'reason="gone"') - gone == 1


def test_cancelled_grpc_call_is_not_computed(service: Service) -> None:
    before = service.computed
    first = service.begin(LONG)
    call = service.stub.ModelInfer.future(message(LONG), timeout=60)
    service.wait_until(lambda: service.value("pipe_queue_length") == 1)
    call.cancel()
    assert first.result().status_code == 200
    assert service.request(SHORT).status_code == 200
    assert service.computed - before == 2
    assert service.value("pipe_requests_in_flight") == 0


@pytest.mark.parametrize(
    "deadline",
    [{"headers": {"x-request-timeout": "0.05"}}, {"parameters": {"timeout": 50_000}}],
    ids=["header", "parameter"],
)
def test_http_deadline_is_kept(service: Service, deadline: dict[str, Any]) -> None:
    before = service.computed
    first = service.begin(LONG)
    began = time.monotonic()
    answer = service.request(SHORT, **deadline)
    assert time.monotonic() - began >= 0.05
    assert (answer.status_code, first.done()) == (504, False)
    assert "it was not computed" in answer.json()["error"]
    assert first.result().status_code == 200
    assert service.computed - before == 1


def test_grpc_deadline_is_kept(service: Service) -> None:
    before = service.computed
    first = service.begin(LONG)
    for request, seconds in ((message(SHORT), 0.05), (message(SHORT, timeout={"int64_param": 50_000}), 60)):
        with pytest.raises(grpc.RpcError) as error:
            service.stub.ModelInfer(request, timeout=seconds)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert first.result().status_code == 200
    assert service.computed - before == 1


def test_full_queue_rejects_requests_of_every_protocol(service: Service) -> None:
    first = service.begin(LONG)
    waiting = [service.threads.submit(service.request, SHORT) for _ in range(3)]
    service.wait_until(lambda: service.value("pipe_queue_length") == 3)
    answers = [service.request(SHORT), service.client.post("/v1/models/tiny:predict", json={"instances": [0]})]
    with pytest.raises(grpc.RpcError) as error:
        service.stub.ModelInfer(message(SHORT), timeout=60)
    assert not first.done()
    for answer in answers:
        assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)
        assert answer.json()["error"] == "3 requests wait already; try again in a moment"
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.client.get("/v2/health/ready").status_code == 200
    assert [one.result().status_code for one in (first, *waiting)] == [200] * 4
    assert service.request(SHORT).status_code == 200


def test_deadline_that_cannot_be_met_is_rejected_immediately(service: Service) -> None:
    first = service.begin(LONG)
    second = service.threads.submit(service.request, LONG)
    service.wait_until(lambda: service.value("pipe_queue_length") == 1)
    answer = service.request(SHORT, headers={"x-request-timeout": "0.05"})
    assert (answer.status_code, first.done()) == (503, False)
    assert "longer than its deadline" in answer.json()["error"]
    assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_memory_of_large_bodies_is_limited(service: Service) -> None:
    """Memory holds four bodies: of eight nearly complete ones some are rejected, and succeed later."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {MOST}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", service.running.port))) for _ in range(8)]
        senders = [service.threads.submit(sock.sendall, head + b" " * (MOST - 100)) for sock in socks]
        refused, _, _ = select.select(socks, [], [], 20)
        answer = refused[0].recv(1000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert b"other requests' bodies take" in answer
        for sender in senders:
            sender.result()
        assert len(select.select(socks, [], [], 0)[0]) <= 4
    service.wait_until(lambda: service.value("pipe_requests_in_flight") == 0)
    large = service.client.post(PATH, content=iter([b" " * (MOST // 2), b" " * (MOST // 2 - 1000), body(SHORT)]))
    assert large.status_code == 200


@pytest.mark.long
def test_bundle_deadline_applies_by_default(service: Service) -> None:
    began = time.monotonic()
    assert service.request(LONG).status_code == 200
    fifteen_seconds = LONG * 15 / (time.monotonic() - began)
    first = service.threads.submit(service.request, fifteen_seconds, {"x-request-timeout": "100"})
    service.wait_until(lambda: service.value("pipe_requests_in_flight") == 1)
    began = time.monotonic()
    assert service.request(SHORT).status_code == 504
    assert 9.9 < time.monotonic() - began < 11
    assert first.result().status_code == 200
