"""Requests that wait while the model of a real service is busy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.signature import Limits, Runtime
from tests.serve.bundles import seal
from tests.serve.load_clients import wait_until
from tests.serve.special_models import slow

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


HELD, QUICK = 1.0, 0.0  # values of the input: a run with HELD lasts until the test releases it
MAX_BODY_BYTES = 17 << 20  # four of them exceed the memory that is reserved for bodies
PATH = "/v2/models/tiny/infer"

# Appended to the codec, which the service imports at its start. It computes while it waits, as a slow model does, and
# long enough that the service never takes such a run for a quick one.
HOLD = """
import hashlib, os, time
from serve.runtime.session import Session

run = Session.run

def run_when_released(self, inputs, outputs=None):
    end = time.thread_time() + 0.1
    if (inputs["x"] >= 1).any():
        open({path!r} + ".runs", "w").close()
    while (inputs["x"] >= 1).any() and (os.path.exists({path!r}) or time.thread_time() < end):
        hashlib.sha256(bytes(1 << 20)).digest()  # without the interpreter's lock, as ONNX Runtime computes
    return run(self, inputs, outputs)

Session.run = run_when_released
"""


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a file that holds runs while it exists."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, module_launcher: Launcher, hold: Path) -> Running:
    """A service that runs one request at a time, with a queue of three and a deadline of 10 s."""
    limits = Limits(max_batch_size=16, max_body_bytes=MAX_BODY_BYTES, max_waiting=3, deadline_seconds=10)
    bundle = slow(tmp_path_factory.mktemp("slow") / "bundle", limits, Runtime(provider="cpu", threads=1, batch_rows=1))
    with (bundle / "codec.py").open("a") as codec:
        codec.write(HOLD.format(path=str(hold)))
    seal(bundle)
    return module_launcher(bundle)


@pytest.fixture
def service(busy: Running, hold: Path) -> Iterator[Service]:
    with (
        ThreadPoolExecutor(8) as threads,
        httpx.Client(base_url=busy.url, timeout=300) as client,
        grpc.insecure_channel(f"127.0.0.1:{busy.grpc_port}") as channel,
    ):
        yield Service(busy, hold, threads, client, GRPCInferenceServiceStub(channel))
        hold.unlink(missing_ok=True)


class Service:
    def __init__(
        self, running: Running, hold: Path, threads: ThreadPoolExecutor, client: httpx.Client, stub: Any
    ) -> None:
        self.running, self.hold, self.threads, self.client, self.stub = running, hold, threads, client, stub

    def request(self, value: float, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.client.post(PATH, content=body(value, **fields), headers=headers or {})

    def start_held(self, headers: dict[str, str] | None = None) -> Future[httpx.Response]:
        """Start a request that runs until `release`, and wait until it runs."""
        runs = self.hold.with_name(self.hold.name + ".runs")
        runs.unlink(missing_ok=True)
        self.hold.touch()
        future = self.threads.submit(self.request, HELD, headers)
        wait_until(runs.exists)
        return future

    def release(self) -> None:
        self.hold.unlink()

    def value(self, name: str, label: str = "") -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == name and label in line
        )

    @property
    def computed(self) -> float:
        return self.value("pipe_batch_requests_count")


def body(value: float, **fields: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}], **fields}
    ).encode()


def message(value: float, **parameters: Any) -> Any:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32"}
    raw = np.float32(value).tobytes()
    return pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[raw], parameters=parameters)


def test_request_of_a_disconnected_client_is_not_computed(service: Service) -> None:
    before, gone = service.computed, service.value("pipe_rejected_total", 'reason="gone"')
    first = service.start_held()
    with socket.create_connection(("127.0.0.1", service.running.port)) as sock:
        text = body(QUICK)
        sock.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
        wait_until(lambda: service.value("pipe_queue_length") == 1)
    for _ in range(3):  # the event loop reads the end of the connection before it answers these
        assert service.client.get("/v2/health/live").status_code == 200
    service.release()
    assert first.result().status_code == 200
    assert service.request(QUICK).status_code == 200
    assert service.computed - before == 2
    assert service.value("pipe_rejected_total", 'reason="gone"') - gone == 1


def test_cancelled_grpc_call_is_not_computed(service: Service) -> None:
    before = service.computed
    first = service.start_held()
    call = service.stub.ModelInfer.future(message(QUICK), timeout=300)
    wait_until(lambda: service.value("pipe_queue_length") == 1)
    call.cancel()
    for _ in range(3):  # on the same connection, after RST_STREAM
        assert service.stub.ServerLive(pb.ServerLiveRequest(), timeout=300).live
    service.release()
    assert first.result().status_code == 200
    assert service.request(QUICK).status_code == 200
    assert service.computed - before == 2
    assert service.value("pipe_requests_in_flight") == 0


@pytest.mark.parametrize(
    "deadline",
    [{"headers": {"x-request-timeout": "0.05"}}, {"parameters": {"timeout": 50_000}}],
    ids=["header", "parameter"],
)
def test_http_deadline_is_kept(service: Service, deadline: dict[str, Any]) -> None:
    before = service.computed
    first = service.start_held()
    answer = service.request(QUICK, **deadline)
    assert (answer.status_code, first.done()) == (504, False)
    assert "it was not computed" in answer.json()["error"]
    service.release()
    assert first.result().status_code == 200
    assert service.computed - before == 1


def test_grpc_deadline_is_kept(service: Service) -> None:
    before = service.computed
    first = service.start_held()
    for request, seconds in ((message(QUICK), 0.05), (message(QUICK, timeout={"int64_param": 50_000}), 60)):
        with pytest.raises(grpc.RpcError) as error:
            service.stub.ModelInfer(request, timeout=seconds)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    service.release()
    assert first.result().status_code == 200
    assert service.computed - before == 1


def test_full_queue_rejects_requests_of_every_protocol(service: Service) -> None:
    first = service.start_held()
    waiting = [service.threads.submit(service.request, QUICK) for _ in range(3)]
    wait_until(lambda: service.value("pipe_queue_length") == 3)
    answers = [service.request(QUICK), service.client.post("/v1/models/tiny:predict", json={"instances": [0]})]
    with pytest.raises(grpc.RpcError) as error:
        service.stub.ModelInfer(message(QUICK), timeout=300)
    for answer in answers:
        assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)
        assert answer.json()["error"] == "3 requests wait already; try again in a moment"
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.client.get("/v2/health/ready").status_code == 200
    service.release()
    assert [one.result().status_code for one in (first, *waiting)] == [200] * 4
    assert service.request(QUICK).status_code == 200


def test_deadline_that_cannot_be_met_is_rejected_immediately(service: Service) -> None:
    measured = service.start_held()
    time.sleep(0.5)  # the service learns that a run takes at least this long
    service.release()
    assert measured.result().status_code == 200
    first = service.start_held()
    second = service.threads.submit(service.request, HELD)
    wait_until(lambda: service.value("pipe_queue_length") == 1)
    answer = service.request(QUICK, headers={"x-request-timeout": "0.05"})
    assert (answer.status_code, first.done()) == (503, False)
    assert "longer than its deadline" in answer.json()["error"]
    service.release()
    assert [one.result().status_code for one in (first, second)] == [200, 200]


@pytest.mark.long
def test_bundle_deadline_applies_by_default(service: Service) -> None:
    first = service.start_held({"x-request-timeout": "100"})
    began = time.monotonic()
    assert service.request(QUICK).status_code == 504
    assert time.monotonic() - began > 9.9
    assert not first.done()
    service.release()
    assert first.result().status_code == 200
