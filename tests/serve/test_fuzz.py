"""Valid requests changed at random: none causes a server error, and none harms the server."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from tests.fuzz import TARGETS
from tests.serve.malformed_requests import BINARY, GOOD_V1, GOOD_V2, JSON, RAW, V1, V2, image

if TYPE_CHECKING:
    from tests.serve.conftest import Running


FEW, MANY = 150, 5000
_NOT_SPOKEN = (501, 505)  # an unsupported method, transfer coding or version of HTTP
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


def http_request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


GOOD = [
    http_request(V1, GOOD_V1, "content-type: application/json"),
    http_request(V2, GOOD_V2, "content-type: application/json", "x-request-timeout: 5"),
    http_request(V2, RAW + b"\0" * 256, f"{BINARY}: {len(RAW)}"),
    b"GET /v2/models/tiny HTTP/1.1\r\nhost: x\r\n\r\n",
    f"POST {V1} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{len(GOOD_V1):x}\r\n".encode()
    + GOOD_V1
    + b"\r\n0\r\n\r\n",
]
MESSAGES = [
    pb.ModelInferRequest(
        model_name="tiny",
        inputs=[{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], **contents}],
        raw_input_contents=raws,
    ).SerializeToString()
    for contents, raws in (({"contents": {"fp32_contents": [0.5] * 64}}, []), ({}, [b"\0" * 256]))
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "end", "insert", "repeat", "flip", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 40),
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\r\n", b"\0", b": ", b"9" * 20, b"{", b"["])),
    ),
    min_size=1,
    max_size=4,
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, -1, "FP32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def broken(good: bytes, steps: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    found = good
    for kind, share, size, more in steps:
        place = int(share * (len(found) or 1))
        part = found[place : place + size]
        new = {"cut": b"", "end": b"", "insert": more + part, "repeat": part * 3, "flip": more[:1] + part[1:]}
        rest = b"" if kind == "end" else found[place + size :]
        found = found[:place] + new.get(kind, part[::-1]) + rest
    return found


def hunt(count: int, test: Callable[..., None], *strategies: Any) -> None:
    """Run a test with the same examples in short runs, and with new ones in long runs."""
    chosen = settings(max_examples=count, deadline=None, database=None, derandomize=count == FEW)
    patient = settings(chosen, suppress_health_check=list(HealthCheck))
    drawn: Any = given(*strategies)
    hunting: Any = patient(drawn(test))
    hunting()


@pytest.fixture
def unharmed(server: Running) -> Iterator[None]:
    """Check before and after the test that good requests are answered, and that memory has not grown."""
    for good in GOOD:
        assert statuses(server, good) == [200]
    before = psutil.Process(server.process.pid).memory_info().rss
    yield
    for good in GOOD:
        assert statuses(server, good) == [200]
    assert psutil.Process(server.process.pid).memory_info().rss - before < 16 << 20
    assert "Traceback" not in server.log


def statuses(server: Running, sent: bytes) -> list[int]:
    """Return the statuses of the final responses to these bytes, read until the connection ends.

    A client that ended its side may also get a 100, with which the service checks whether it is still there.
    """
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := sock.recv(1 << 16):
            answer += chunk
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-9]\d\d) ", answer)]


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_mutated_requests_are_answered_or_close_the_connection(server: Running, count: int) -> None:
    def test(good: bytes, steps: Any) -> None:
        sent = broken(good, steps)
        found = statuses(server, sent)
        assert found or not sent.strip(b"\r\n"), sent
        assert all(status < 500 or status in _NOT_SPOKEN for status in found), (sent, found)

    hunt(count, test, st.sampled_from(GOOD), STEPS)


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_mutated_json_is_answered(server: Running, count: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def test(field: str, inside: bool, value: Any) -> None:
        body = {"inputs": [image(**{field: value})]} if inside else {"inputs": [image()], field: value}
        path = V2 if field != "instances" else V1
        connection.request("POST", path, json.dumps({"instances": value} if path == V1 else body), JSON)
        response = connection.getresponse()
        text = json.loads(response.read())
        assert response.status in (200, 400, 413), (body, text)
        assert response.status == 200 or " " in text["error"]

    fields = ["name", "shape", "datatype", "data", "parameters", "outputs", "id", "inputs", "instances", "other"]
    hunt(count, test, st.sampled_from(fields), st.booleans(), VALUES)
    connection.close()


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_mutated_messages_are_answered(server: Running, count: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def test(good: bytes, steps: Any) -> None:
            sent = broken(good, steps)
            call = infer.future(sent, timeout=60)
            assert call.code() not in _FAULTS, (sent, call.details())

        hunt(count, test, st.sampled_from(MESSAGES), STEPS)


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_raise_nothing_but_their_refusals(name: str) -> None:
    """`make fuzz` runs the same for as long as one likes."""
    target = TARGETS[name]

    def test(good: bytes, steps: Any) -> None:
        target(broken(good, steps))

    for seed in target.seeds:
        target(seed)
    hunt(FEW, test, st.sampled_from(target.seeds), STEPS)
