"""Whatever is in a body, in any protocol and encoding: its work is bounded by its bytes, and all of it is counted."""

from __future__ import annotations

import asyncio
import gzip
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.serve.attacks import JSON_BODIES, MESSAGES
from benchmarks.serve.workloads import WORKLOADS
from pipeline.contract.bundle import open_bundle
from serve import limits
from serve.app import App
from serve.grpc.service import Calls
from serve.limits import Budget
from serve.models import Model, ModelRepository
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics
from serve.request_context import RequestContext
from serve.runtime.loading import load_predictor
from tests.serve.wire.http1.fakes import connect
from tests.serve.wire.http2.frames import CLIENT_PREFACE, GRPC, MemoryConnection, data, headers
from tests.serve.wire.transport import FakeTransport

WORK_PER_BYTE = 1000  # about a microsecond for each byte on the wire
LINES = 20_000  # of Python on the event loop for a body, besides one for each of its bytes
CPU_SECONDS = 0.1  # of a body on a slow machine, besides a microsecond for each byte
CODINGS: dict[str, Callable[[bytes], bytes]] = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}
SIZES = st.sampled_from([100, 3000, 20_000, 70_000, 300_000, 3_000_000])
CALL = [*GRPC[:2], (b":path", b"/inference.GRPCInferenceService/ModelInfer"), (b"content-type", b"application/grpc")]


class Meter(Budget):
    """Notes what each request was charged for."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.most_work = self.most_bytes = 0

    def release(self, request: RequestContext) -> None:
        self.most_work = max(self.most_work, request.work)
        self.most_bytes = max(self.most_bytes, request.held_bytes)
        super().release(request)

    def check_address(self, request: RequestContext) -> None:
        """Let an address try as often as the test likes."""


class Host:
    """A service in this process, without sockets."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.meter, repository, model = ThreadPoolExecutor(1), Meter(), ModelRepository(), Model("net")
        repository.add(model)
        bundle = open_bundle(WORKLOADS["digits"].bundle(folder / "bundle"))
        version = model.add(load_predictor(bundle, "cpu", 1), self.pool, self.meter)
        requests = RequestLog(Metrics(list))
        self._app = App(repository, requests, budget=self.meter)
        self._calls = Calls(repository, requests, (), version.infer_limits, budget=self.meter)

    async def post(self, path: str, body: bytes, coding: str) -> int:
        """Return the status of the answer."""
        transport = FakeTransport()
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (path.encode(), len(body))
        head += b"content-encoding: %b\r\n\r\n" % coding.encode() if coding else b"\r\n"
        connection = connect(self._app, transport)
        for place in range(0, len(head + body), 1 << 16):
            connection.data_received((head + body)[place : place + (1 << 16)])
            while transport.reading_paused and not transport.statuses and not transport.closing:
                await asyncio.sleep(0)
        while not transport.statuses:
            await asyncio.sleep(0)
        return transport.statuses[0]

    async def call(self, message: bytes, coding: str) -> int:
        """Return the status in terms of HTTP: gRPC's INVALID_ARGUMENT and RESOURCE_EXHAUSTED are the client's."""
        client = MemoryConnection(self._calls)
        client.send(CLIENT_PREFACE, headers(1, [*CALL, (b"grpc-encoding", coding.encode())] if coding else CALL))
        body = bytes([bool(coding)]) + len(message).to_bytes(4, "big") + message
        found = []
        for place in range(0, len(body), 16_000):
            found += client.send(data(1, body[place : place + 16_000], int(place + 16_000 >= len(body))))
        while self._calls._running:
            await asyncio.sleep(0)
        answer = b"".join(payload for _, _, _, payload in (*found, *client.received()))
        statuses = {b"grpc-status\x013": 400, b"grpc-status\x018": 413, b"grpc-status\x010": 200}
        return next(status for text, status in statuses.items() if text in answer)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("price"))
    yield made
    made.pool.shutdown()
    made.meter.decoders.shutdown()


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Count the lines of the service that run on the event loop: work that no machine does faster."""
    lines, root = [0], str(Path(limits.__file__).parent)

    def trace(code: FrameType, event: str, _argument: Any) -> Any:
        if not code.f_code.co_filename.startswith(root):
            return None
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def encoded(name: str, size: int, coding: str) -> bytes:
    make = JSON_BODIES[name][1] if name in JSON_BODIES else MESSAGES[name]
    return CODINGS[coding](make(size))


def send(host: Host, name: str, body: bytes, coding: str) -> int:
    """Return the status."""
    is_json = name in JSON_BODIES
    return asyncio.run(host.post(JSON_BODIES[name][0], body, coding) if is_json else host.call(body, coding))


@pytest.mark.parametrize("name", [*JSON_BODIES, *MESSAGES])
def test_work_for_a_body_is_bounded_by_its_bytes(name: str, host: Host) -> None:
    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(size=SIZES, coding=st.sampled_from(list(CODINGS)))
    def test(size: int, coding: str) -> None:
        host.meter.most_work = host.meter.most_bytes = 0
        body = encoded(name, size, coding)
        sent = len(body)
        with counted_lines() as lines:
            status = send(host, name, body, coding)
        assert status in (200, 400, 413)
        assert host.meter.held_bytes == 0
        assert host.meter.most_bytes <= limits.OBJECTS_BYTES + WORK_PER_BYTE * sent
        assert host.meter.most_work <= 2 * limits.OBJECTS_BYTES + WORK_PER_BYTE * sent
        assert lines[0] <= LINES + sent

    test()


@pytest.mark.long
@pytest.mark.parametrize("name", [*JSON_BODIES, *MESSAGES])
def test_processor_time_of_a_body_is_bounded_by_its_bytes(name: str, host: Host) -> None:
    for coding in CODINGS:
        for size in (3000, 70_000, 3_000_000, 16_000_000):
            body = encoded(name, size, coding)
            send(host, name, body, coding)
            start = time.process_time()
            send(host, name, body, coding)
            assert time.process_time() - start < CPU_SECONDS + 1e-6 * len(body), (coding, size, len(body))
