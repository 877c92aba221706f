"""Calls that end early: their status, metrics and memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve.grpc.service import Calls
from serve.limits import BodyLimits
from serve.models import ModelRepository
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics
from serve.request_context import in_flight
from serve.security import ApiKeys
from serve.wire.http2 import frames
from serve.wire.http2.frames import END_HEADERS, END_STREAM, ErrorCode, frame
from serve.wire.http2.hpack import Field
from tests.serve.wire.http2.frames import CLIENT_PREFACE, GRPC, MemoryConnection, data, decode_fields, headers, resets

MOST = 30_000
KEY = "a-key-of-the-tests-1"
CALL = [*GRPC[:2], (b":path", b"/inference.GRPCInferenceService/ModelInfer"), (b"content-type", b"application/grpc")]
PROBE = [*GRPC[:2], (b":path", b"/inference.GRPCInferenceService/ServerLive"), (b"content-type", b"application/grpc")]


class GrpcConnection(MemoryConnection):
    """A connection to a gRPC service without models."""

    def __init__(self, keys: ApiKeys | None = None) -> None:
        self.requests = RequestLog(Metrics(list))
        self.repository = ModelRepository()
        self.calls = Calls(self.repository, self.requests, [("x-served-by", "me")], BodyLimits(MOST), keys)
        super().__init__(app=self.calls)
        self.send(CLIENT_PREFACE)

    @property
    def rejected(self) -> dict[str, int]:
        return dict(self.requests.metrics.no_model.rejected)


def grpc_status(found: list[frames.Frame]) -> tuple[str, str]:
    """Return gRPC status and message; RST_STREAM must stop the client from sending."""
    fields = decode_fields(found[0][3])
    assert fields[b"x-served-by"] == b"me"
    assert fields[b"x-request-id"]
    assert resets(found) == {1: ErrorCode.NO_ERROR}
    return fields[b"grpc-status"].decode(), fields[b"grpc-message"].decode()


def test_watch_ends_with_its_client_and_is_no_failure() -> None:
    client = GrpcConnection()
    watch = [*GRPC[:2], (b":path", b"/grpc.health.v1.Health/Watch"), (b"content-type", b"application/grpc")]
    _, _, _, not_serving = client.send(headers(1, watch), data(1, b"\0\0\0\0\0"))[-1]
    assert not_serving == b"\0\0\0\0\2\x08\2", "without models nothing is ready"
    client.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert client.streams.open == {}
    client.repository.drain()
    assert client.received() == []
    assert client.rejected == {}


def test_calls_that_arrive_together_are_in_flight_before_the_first_begins() -> None:
    """Otherwise they would not be merged into a batch."""

    async def run() -> None:
        client, before = GrpcConnection(), in_flight.count
        calls = [(headers(number, CALL), data(number, b"\0\0\0\0\0")) for number in (1, 3, 5)]
        client.send(*(part for call in calls for part in call))
        assert in_flight.count == before + 3
        while client.calls._running:
            await asyncio.sleep(0)
        assert in_flight.count == before

    asyncio.run(run())


def test_incomplete_call_times_out() -> None:
    client = GrpcConnection()
    assert client.send(headers(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 100, 0)) == []
    assert client.calls._budget.held_bytes == 3 * 105
    client.streams.check_timeouts(float("inf"))
    assert grpc_status(client.received()) == ("1", "the call did not arrive whole in time")
    assert (client.rejected, client.calls._budget.held_bytes) == ({"slow": 1}, 0)


def test_cancelled_call_is_counted_and_frees_its_bytes() -> None:
    client = GrpcConnection()
    client.send(headers(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 100, 0), frames.rst_stream(1, ErrorCode.CANCEL))
    assert (client.received(), client.rejected, client.calls._budget.held_bytes) == ([], {"gone": 1}, 0)


def test_stream_error_frees_the_bytes_of_a_call() -> None:
    client = GrpcConnection()
    client.send(headers(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 200, 0), frame(frames.WINDOW_UPDATE, 0, 1, b"\0" * 4))
    assert (client.rejected, client.calls._budget.held_bytes, client.streams.open) == ({"gone": 1}, 0, {})


def test_oversized_call_is_rejected_by_its_prefix() -> None:
    client = GrpcConnection()
    found = client.send(headers(1, CALL), data(1, b"\0\x10", 0), data(1, b"\0\0", 0), data(1, b"\0", 0))
    status, sentence = grpc_status(found)
    assert (status, "larger than max" in sentence) == ("8", True)
    assert client.send(data(1, b"x" * 16384, 0)) == []
    assert (client.rejected, client.calls._budget.held_bytes) == ({"size": 1}, 0)


def test_call_without_memory_is_rejected_as_retryable() -> None:
    client = GrpcConnection()
    client.calls._budget.held_bytes = client.calls._budget.total_bytes
    status, sentence = grpc_status(client.send(headers(1, CALL), data(1, b"\0\0\0\1\0" + b"x" * 300, 0)))
    assert (status, "try again in a moment" in sentence) == ("14", True)
    assert (client.rejected, client.calls._budget.held_bytes) == ({"busy": 1}, client.calls._budget.total_bytes)


def test_missing_key_is_rejected_before_the_message(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY + "\n")
    client = GrpcConnection(ApiKeys(tmp_path / "keys"))
    status, sentence = grpc_status(client.send(headers(1, CALL)))
    assert (status, "requires an API key" in sentence) == ("16", True)
    assert client.send(headers(3, PROBE)) == []
    assert client.send(headers(5, [*CALL, (b"x-api-key", KEY.encode())])) == []
    assert list(client.streams.open) == [3, 5]


def test_disconnect_frees_every_call() -> None:
    client = GrpcConnection()
    for number in range(1, 20, 2):
        client.send(headers(number, CALL), data(number, b"\0\0\0\1\0" + b"x" * 300, 0))
    assert client.calls._budget.held_bytes == 10 * 3 * 305
    client.streams.close()
    assert (client.rejected, client.calls._budget.held_bytes, client.streams.open) == ({"gone": 10}, 0, {})


GET = [(b":method", b"GET"), *GRPC[1:]]
JSON = [*CALL[:-1], (b"content-type", b"application/json")]


@pytest.mark.parametrize(("fields", "status"), [(GET, b"405"), (JSON, b"415")])
@pytest.mark.parametrize("end", ["window", "reset", "close", "timeout"])
def test_refusal_without_a_window_leaves_the_connection_usable(fields: list[Field], status: bytes, end: str) -> None:
    client = GrpcConnection()
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    (head,) = client.send(headers(1, fields, END_HEADERS | END_STREAM))
    assert decode_fields(head[3])[b":status"] == status
    assert client.send(frame(frames.PING, 0, 0, b"12345678")) == [(frames.PING, frames.ACK, 0, b"12345678")]
    if end == "window":
        kinds = [kind for kind, *_ in client.send(frames.window_update(1, 1000))]
        assert kinds == [frames.DATA, frames.HEADERS]
    elif end == "reset":
        assert client.send(frames.rst_stream(1, ErrorCode.CANCEL)) == []
    elif end == "close":
        client.streams.close()
    else:
        client.streams.check_timeouts(float("inf"))
        assert resets(client.received()) == {1: ErrorCode.CANCEL}
    assert client.streams.open == {}
