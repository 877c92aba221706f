from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import socket
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.system.errors import InvalidPayload
from serve.app import App
from serve.errors import Busy, ClientDisconnected, TooLarge, UnsupportedMediaType
from serve.limits import INFLATION_ALLOWANCE_BYTES, SLICE_BYTES, BodyLimits, Budget
from serve.models import Model, ModelRepository
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics
from serve.request_body import parse_object, read_body
from serve.request_context import HttpRequest, parse_timeout_parameter
from serve.runtime.loading import load_predictor
from serve.wire.request import IncomingRequest
from tests.serve.wire.http1.fakes import connect
from tests.serve.wire.transport import FakeTransport

if TYPE_CHECKING:
    from tests.serve.conftest import Running


HEAD = "POST /v1/models/tiny:predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def _send(server: Running, *parts: bytes) -> bytes:
    """Return all that the service sends in response to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        for part in parts:
            sock.sendall(part)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
        return answer


def test_too_large_content_length_is_refused_before_the_body(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(f"{HEAD}content-length: 1000000000000\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}"):
            chunk = sock.recv(4096)
            assert chunk, answer
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert answer.endswith(b'{"error":"body: larger than the limit of 100000 bytes"}')


def test_chunked_body_is_refused_when_it_exceeds_the_limit(server: Running) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = f"{HEAD}connection: close\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = _send(server, head, chunk, chunk, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_too_large_request_with_expect_gets_no_100_continue(server: Running) -> None:
    answer = _send(server, f"{HEAD}content-length: 200000\r\nexpect: 100-continue\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer


def test_disconnect_within_a_body_does_no_harm(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(f"{HEAD}content-length: 1000\r\n\r\n[".encode())
    answer = _send(server, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in server.log


MOST = 1 << 20
PLAIN = os.urandom(5000) + b" " * 5000


def bare(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


class Upload(HttpRequest):
    """A request whose body comes in these pieces; without any, its client has disconnected."""

    address = ""

    def __init__(self, headers: dict[bytes, bytes], *pieces: bytes) -> None:
        IncomingRequest.__init__(self, headers, "/")
        self._sent = list(pieces)

    async def receive(self) -> tuple[bytes, bool]:
        if not self._sent:
            raise ClientDisconnected("the client hung up")
        return self._sent.pop(0), bool(self._sent)


def body(coding: str, *pieces: bytes, most: int = MOST) -> bytes:
    """Return the body that the application reads from these pieces."""
    request = Upload({b"content-encoding": coding.encode()} if coding else {}, *pieces)
    return asyncio.run(read_body(request, BodyLimits(most, math.inf), Budget()))


@pytest.mark.parametrize("pieces", [1, 4])
def test_bodies_share_one_memory_budget(pieces: int) -> None:
    budget, held, size, total = Budget(64 << 20), [], 600_000, 64 << 20
    sent = cut(b"x" * size, size // pieces)
    while budget.held_bytes + 2 * size <= total:
        held.append(Upload({}, *sent))
        asyncio.run(read_body(held[-1], BodyLimits(MOST), budget))
    assert len(held) == total // (2 * size), "in pieces and whole"
    last = Upload({}, *sent)
    with pytest.raises(Busy, match="other requests take"):
        asyncio.run(read_body(last, BodyLimits(MOST), budget))
    held.append(last)
    for request in held:
        budget.release(request)
    assert budget.held_bytes == 0


def test_compressed_body_counts_with_its_decompressed_size() -> None:
    budget, size = Budget(1 << 20), 500_000
    first, second = (Upload({b"content-encoding": b"gzip"}, gzip.compress(b"x" * size)) for _ in range(2))
    asyncio.run(read_body(first, BodyLimits(MOST), budget))
    assert budget.held_bytes == first.held_bytes == 2 * size, "in pieces and whole"
    with pytest.raises(Busy, match="other requests take"):
        asyncio.run(read_body(second, BodyLimits(MOST), budget))


def test_refused_requests_give_their_memory_back(bundle: Bundle, pool: Executor) -> None:
    budget, repository, model = Budget(20_000), ModelRepository(), Model("tiny")
    repository.add(model)
    model.add(load_predictor(bundle, "cpu", 1), pool, budget)
    app = App(repository, RequestLog(Metrics(list)), budget=budget)

    async def send(body: bytes) -> list[int]:
        transport = FakeTransport()
        head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        connect(app, transport).data_received(head + body)
        while not transport.statuses:
            await asyncio.sleep(0)
        return transport.statuses

    assert [asyncio.run(send(b"x" * 8000)) for _ in range(3)] == [[400]] * 3, "there is memory for one at a time"
    assert budget.held_bytes == 0


def cut(data: bytes, size: int) -> Sequence[bytes]:
    return [data[place : place + size] for place in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
@pytest.mark.parametrize(
    ("coding", "compress"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP ", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", bare),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_compressed_body_is_decompressed(coding: str, compress: Callable[[bytes], bytes], size: int) -> None:
    assert body(coding, *cut(compress(PLAIN), size)) == PLAIN


class CountingStream:
    """A stream of zlib; `given` counts the bytes that all of them were given."""

    given = 0

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def decompress(self, data: bytes, most: int) -> bytes:
        CountingStream.given += len(data)
        return bytes(self._stream.decompress(data, most))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    make = zlib.decompressobj
    monkeypatch.setattr(CountingStream, "given", 0)
    monkeypatch.setattr(zlib, "decompressobj", lambda wbits: CountingStream(make(wbits)))
    return lambda: CountingStream.given


def test_many_empty_streams_cost_no_more_than_one(given: Callable[[], int]) -> None:
    bomb = gzip.compress(b"") * 50_000
    with pytest.raises(InvalidPayload, match="goes on behind"):
        body("gzip", bomb, most=len(bomb))
    assert given() <= len(bomb)


def test_large_bodies_are_given_to_zlib_once(given: Callable[[], int]) -> None:
    plain = os.urandom(8 << 20)
    packed = gzip.compress(plain, 1)
    assert body("gzip", packed, most=9 << 20) == plain
    assert given() < 1.1 * len(packed)


@pytest.mark.parametrize("repeated", [1, 3])
def test_slice_that_ends_inside_a_match_is_decompressed(repeated: int) -> None:
    plain = b"\0" * (repeated * SLICE_BYTES)
    assert body("deflate", bare(plain)) == plain


def test_body_of_zeros_is_accepted() -> None:
    images = bytes(16 * 3 * 224 * 224 * 4)
    assert body("gzip", gzip.compress(images), most=64 << 20) == images


def test_large_tensors_that_compress_well_are_accepted() -> None:
    tokens = np.random.default_rng(3).integers(0, 50_000, (5000, 512))  # int64, and half of it padding
    tokens[:, 256:] = 0
    packed = zlib.compress(tokens.tobytes(), 6)
    assert tokens.nbytes > INFLATION_ALLOWANCE_BYTES
    assert body("deflate", *cut(packed, 60_000), most=64 << 20) == tokens.tobytes()


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_body_that_inflates_too_much_is_refused_while_it_grows(size: int) -> None:
    bomb = gzip.compress(bytes(60 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="decompressed it is more than 100 times as large; send it uncompressed"):
            body("gzip", *cut(bomb, size), most=64 << 20)
        assert tracemalloc.get_traced_memory()[1] < INFLATION_ALLOWANCE_BYTES + 4 * SLICE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip,deflate", "deflate;q=1", "\xff"])
def test_unsupported_coding_is_refused_naming_the_supported_ones(coding: str) -> None:
    with pytest.raises(UnsupportedMediaType, match=r"content-encoding: .* send one of gzip, deflate") as refusal:
        body(coding, b"{}")
    assert dict(refusal.value.headers) == {b"accept-encoding": b"gzip, deflate"}


@pytest.mark.parametrize(
    ("coding", "data", "named"),
    [
        ("gzip", PLAIN, "not valid gzip"),
        ("gzip", zlib.compress(PLAIN), "not valid gzip"),
        ("gzip", gzip.compress(PLAIN)[:-5], "ends in the middle"),
        ("gzip", gzip.compress(PLAIN) + b"more", "behind the end"),
        ("gzip", gzip.compress(PLAIN) + gzip.compress(b""), "behind the end of its gzip data; send one stream"),
        ("gzip", gzip.compress(PLAIN)[:-8] + b"\0" * 8, "not valid gzip"),  # its checksum
        ("deflate", zlib.compress(PLAIN)[:-5], "ends in the middle"),
        ("deflate", zlib.compress(PLAIN) + b"more", "behind the end"),
        ("deflate", b"\xff" * 100, "not valid deflate"),
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_invalid_compressed_body_is_refused(coding: str, data: bytes, named: str, size: int) -> None:
    with pytest.raises(InvalidPayload, match=named):
        body(coding, *cut(data, size))


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress, bare])
def test_decompression_bomb_is_refused_before_it_is_decompressed_whole(compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(b"\0" * (30 << 20))
    assert len(bomb) < MOST
    coding = "gzip" if compress is gzip.compress else "deflate"
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="decompressed it is larger than the limit of 1048576 bytes"):
            body(coding, bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["", "gzip"])
def test_body_that_exceeds_the_limit_in_pieces_is_refused(coding: str) -> None:
    data = os.urandom(2000)
    with pytest.raises(TooLarge, match="body: larger than the limit of 1000 bytes"):
        body(coding, *cut(gzip.compress(data) if coding else data, 100), most=1000)


@pytest.mark.parametrize("coding", ["", "gzip"])
def test_disconnect_within_a_body_is_reported(coding: str) -> None:
    with pytest.raises(ClientDisconnected):
        body(coding)


def test_timeout_beyond_any_number_means_no_timeout() -> None:
    assert parse_timeout_parameter(2**64) == 2**64 / 1e6
    assert parse_timeout_parameter(10**400) == parse_timeout_parameter(0) == math.inf


@pytest.mark.parametrize("value", ["[[1], true]", '[{"x": 1}, null, [2]]', '[1, {"x": 1}]', '{"x": [{}, "a:b"]}'])
def test_names_in_lists_of_any_values_are_counted(value: str) -> None:
    text = f'{{"a": {value}, "b:c": {value}}}'
    assert parse_object(text.encode()) == json.loads(text)
    with pytest.raises(InvalidPayload, match='an object has the name "a" twice'):
        parse_object(f'{{"a": 1, "a": {value}}}'.encode())
