"""Fuzzing: valid frames in any order, with random changes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from serve.wire.http2 import frames
from serve.wire.http2.frames import ConnectionFault, frame
from tests.serve.wire.http2.frames import (
    CLIENT_PREFACE,
    GRPC,
    EchoConnection,
    bodies,
    encode_block,
    open_connection,
    request,
    split_frames,
)

if TYPE_CHECKING:
    from tests.serve.conftest import Running


FEW, MANY = 150, 2500
TENSOR = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]}
GOOD = pb.ModelInferRequest(model_name="tiny", inputs=[TENSOR], raw_input_contents=[b"\0" * 256])
HEAD = encode_block(
    [
        *GRPC[:2],
        (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
        (b"content-type", b"application/grpc"),
        (b"grpc-timeout", b"5S"),
    ]
)
PAYLOADS = [
    HEAD,
    HEAD[: len(HEAD) // 2],
    HEAD[len(HEAD) // 2 :],
    b"\0\0\0\1\x2f" + GOOD.SerializeToString(),
    frames.settings({frames.INITIAL_WINDOW_SIZE: 7, frames.MAX_FRAME_SIZE: 16384})[9:],
    b"",
    b"\0\0\0\0",
    b"\0\0\0\x08",
    b"\x7f\xff\xff\xff",
    b"retiring",
    b"\x40\x01a\x01b\xbe\xbe",
    b"\x3f\xe1\x1f",
]
FRAMES = st.tuples(
    st.sampled_from(range(11)),
    st.sampled_from([0, 1, 4, 5, 8, 0x25, 0x2D, 0xFF]),
    st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, frames.MAX_WINDOW]),
    st.sampled_from(PAYLOADS) | st.binary(max_size=40),
)
CALLS = st.sampled_from(
    [(frames.HEADERS, 4, number, HEAD) for number in (1, 3, 5)]
    + [(frames.DATA, 1, number, PAYLOADS[3]) for number in (1, 3, 5)]
)
FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3), st.integers(0, 4)), max_size=3)
CASES = st.tuples(st.lists(FRAMES | CALLS, max_size=12), FLIPS)


def encode_case(case: tuple[list[frames.Frame], list[tuple[float, bytes, int]]]) -> bytes:
    sent, flips = case
    found = b"".join([frame(*one) for one in sent])
    for share, more, size in flips:
        place = int(share * len(found))
        found = found[:place] + more + found[place + size :]
    return CLIENT_PREFACE + found


def run_examples(count: int, test: Callable[..., None]) -> None:
    """Use the same examples in every short run, and new ones in a long run."""
    chosen = settings(max_examples=count, deadline=None, database=None, derandomize=count == FEW)
    drawn: Any = given(CASES)
    settings(chosen, suppress_health_check=list(HealthCheck))(drawn(test))()


@pytest.mark.parametrize("count", [FEW, pytest.param(2 * MANY, marks=pytest.mark.long)])
def test_random_frames_leave_no_state_behind(count: int) -> None:
    def test(case: Any) -> None:
        client = EchoConnection()
        with contextlib.suppress(ConnectionFault):
            client.send(encode_case(case))
        client.streams.close()
        for waiting in client.app.waiting:
            client.app.answer(*waiting)
        assert client.streams.open == {}
        assert client.streams.send_queue.queued_bytes == 0
        begun = sum(event.startswith("headers") for event in client.app.events)
        ended = sum(event.startswith(("cancel", "complete")) for event in client.app.events)
        assert ended <= begun

    run_examples(count, test)
    assert bodies(open_connection().send(request(1))) == {1: b"hello"}


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_service_survives_random_frames(server: Running, count: int) -> None:
    def test(case: Any) -> None:
        with (
            socket.create_connection(("127.0.0.1", server.grpc_port), 10) as sock,
            contextlib.suppress(ConnectionError),
        ):
            sock.sendall(encode_case(case))
            sock.shutdown(socket.SHUT_WR)
            found = b""
            while chunk := sock.recv(1 << 16):
                found += chunk
            assert found[:9] == frames.FRAME_HEADER.pack(0, 18, frames.SETTINGS, 0, 0)
            split_frames(found)

    process = psutil.Process(server.process.pid)
    check_answer(server)
    before = process.memory_info().rss
    run_examples(count, test)
    check_answer(server)
    assert process.memory_info().rss - before < 16 << 20
    assert "Traceback" not in server.log


def check_answer(server: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        assert GRPCInferenceServiceStub(channel).ModelInfer(GOOD, timeout=60).model_name == "tiny"
