"""Clients that send requests without pause and record failures while a test changes the service."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

SECONDS = 20


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition is true; the time limit is only for a hang."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


@dataclass(frozen=True)
class Answer:
    sent: float  # by the monotonic clock, before a byte of it was sent
    by: str
    bundle: str


class Clients(ABC):
    """Threads that send requests; `heard` has the answers, `refused` is set when connections are refused."""

    def __init__(self) -> None:
        self.heard: list[Answer] = []
        self.failures: list[str] = []
        self.refused = threading.Event()
        self._stop = threading.Event()

    def answers(self, count: int, by: str = "", bundle: str = "") -> None:
        """Wait for that many more answers, from one process or of one bundle if it is named."""
        deadline, start = time.monotonic() + SECONDS, len(self.heard)
        while sum(by in ("", one.by) and bundle in ("", one.bundle) for one in self.heard[start:]) < count:
            assert time.monotonic() < deadline, f"no answers: {self.failures[:3]}"
            time.sleep(0.005)

    @property
    def served_by(self) -> set[str]:
        return {one.by for one in self.heard}

    @contextmanager
    def running(self, clients: int) -> Iterator[Any]:
        with ThreadPoolExecutor(clients) as pool:
            done = [pool.submit(self._client) for _ in range(clients)]
            try:
                yield self
            finally:
                self._stop.set()
            for one in done:
                one.result()

    @abstractmethod
    def _client(self) -> None:
        """Send requests and record the answers until `_stop` is set."""


class Load(Clients):
    """HTTP clients: one connection for each request, or one for all as long as the service keeps it."""

    def __init__(self, port: int, body: dict[str, Any], *, keep_alive: bool, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.tls = tls
        self.port = port
        self.body = httpx.Request("POST", "http://x", json=body).read()
        self.keep_alive = keep_alive

    def _client(self) -> None:
        while not (self._stop.is_set() or self.refused.is_set()):
            connection = self._connection()
            try:
                connection.connect()
            except ConnectionRefusedError:
                self.refused.set()
                return
            try:
                self._ask(connection)
            except OSError as error:
                self.failures.append(repr(error))
            except http.client.HTTPException as error:
                self.failures.append(repr(error))
            finally:
                connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls:
            return http.client.HTTPSConnection("localhost", self.port, timeout=SECONDS, context=self.tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        more = True
        while more:
            sent = time.monotonic()
            connection.request("POST", "/v1/models/tiny:predict", self.body, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                self.failures.append(f"{response.status} {text[:200]!r}")
            self.heard.append(Answer(sent, response.headers["x-served-by"], response.headers["x-bundle-digest"]))
            more = self.keep_alive and not response.will_close and not self._stop.is_set()


class GrpcLoad(Clients):
    """gRPC clients: one channel each, with several calls at a time; channels reconnect by themselves."""

    def __init__(self, port: int, callers: int = 1) -> None:
        super().__init__()
        self.callers = callers
        self.port = port
        tensor = {"name": "image", "datatype": "FP32", "shape": (1, 1, 8, 8)}
        raw = np.ones((1, 1, 8, 8), np.float32).tobytes()
        self.request = pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[raw])

    def _client(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        with (
            grpc.insecure_channel(f"127.0.0.1:{self.port}", options) as channel,
            ThreadPoolExecutor(self.callers) as pool,
        ):
            stub = GRPCInferenceServiceStub(channel)
            for done in [pool.submit(self._call, stub) for _ in range(self.callers)]:
                done.result()

    def _call(self, stub: Any) -> None:
        while not (self._stop.is_set() or self.refused.is_set()):
            sent = time.monotonic()
            try:
                _, call = stub.ModelInfer.with_call(self.request, timeout=SECONDS)
            except grpc.RpcError as error:
                self._failed(error)
            else:
                received = dict(call.trailing_metadata())
                self.heard.append(Answer(sent, received["x-served-by"], received["x-bundle-digest"]))

    def _failed(self, error: Any) -> None:
        if "Connection refused" in error.details():
            self.refused.set()
        else:
            self.failures.append(f"{error.code()} {error.details()}")
