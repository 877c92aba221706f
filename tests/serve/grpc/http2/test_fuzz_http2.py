"""HTTP/2 nobody would write: good frames in any order, changed at random. None is our fault, and none does harm."""

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

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import ConnectionFault, frame

from ...wire import GRPC, HELLO, Echoing, answers, block, cut, greeted, request

if TYPE_CHECKING:
    from tests.serve.conftest import Running


FEW, MANY = 150, 5000
TENSOR = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]}
GOOD = pb.ModelInferRequest(model_name="tiny", inputs=[TENSOR], raw_input_contents=[b"\0" * 256])
HEAD = block(
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
    st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, frames.MOST_WINDOW]),
    st.sampled_from(PAYLOADS) | st.binary(max_size=40),
)
CALLS = st.sampled_from(
    [(frames.HEADERS, 4, number, HEAD) for number in (1, 3, 5)]
    + [(frames.DATA, 1, number, PAYLOADS[3]) for number in (1, 3, 5)]
)
FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3), st.integers(0, 4)), max_size=3)
SAID = st.tuples(st.lists(FRAMES | CALLS, max_size=12), FLIPS)


def written(said: tuple[list[frames.Frame], list[tuple[float, bytes, int]]]) -> bytes:
    made, flips = said
    found = b"".join([frame(*one) for one in made])
    for share, more, size in flips:
        place = int(share * len(found))
        found = found[:place] + more + found[place + size :]
    return HELLO + found


def hunt(count: int, test: Callable[..., None]) -> None:
    """The same each time while they are few; others each time while they are many."""
    chosen = settings(max_examples=count, deadline=None, database=None, derandomize=count == FEW)
    drawn: Any = given(SAID)
    settings(chosen, suppress_health_check=list(HealthCheck))(drawn(test))()


@pytest.mark.parametrize("count", [4 * FEW, pytest.param(4 * MANY, marks=pytest.mark.long)])
def test_the_connection_understands_it_or_ends_and_holds_on_to_nothing(count: int) -> None:
    def test(said: Any) -> None:
        talk = Echoing()
        with contextlib.suppress(ConnectionFault):
            talk.say(written(said))
        talk.streams.close()
        for waiting in talk.app.waiting:
            talk.app.answer(*waiting)
        assert talk.streams.open == {}
        assert talk.streams.outbox.held == 0
        begun = sum(told.startswith("opened") for told in talk.app.told)
        ended = sum(told.startswith(("lost", "complete")) for told in talk.app.told)
        assert ended <= begun

    hunt(count, test)
    assert answers(greeted().say(request(1))) == {1: b"hello"}


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_the_service_answers_it_or_ends_the_connection_and_is_as_it_was(server: Running, count: int) -> None:
    def test(said: Any) -> None:
        with (
            socket.create_connection(("127.0.0.1", server.grpc_port), 10) as sock,
            contextlib.suppress(ConnectionError),
        ):
            sock.sendall(written(said))
            sock.shutdown(socket.SHUT_WR)
            found = b""
            while chunk := sock.recv(1 << 16):
                found += chunk
            assert found[:9] == frames.HEAD.pack(0, 18, frames.SETTINGS, 0, 0)
            cut(found)

    process = psutil.Process(server.process.pid)
    good(server)
    before = process.memory_info().rss
    hunt(count, test)
    good(server)
    assert process.memory_info().rss - before < 16 << 20
    assert "Traceback" not in server.log


def good(server: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        assert GRPCInferenceServiceStub(channel).ModelInfer(GOOD, timeout=20).model_name == "tiny"
