"""grpcio clients against the server: many calls on one channel, large messages, and shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.signature import Limits
from tests.serve.load_clients import SECONDS
from tests.serve.special_models import slow

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


ROWS = 4 << 20  # of one number each: 16 MB
LARGE = Limits(max_batch_size=ROWS, max_body_bytes=4 * ROWS)
ENDLESS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
Numbers = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def adding(module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A service that adds one to numbers."""
    return module_launcher(slow(tmp_path_factory.mktemp("adding") / "bundle", LARGE))


@pytest.fixture
def channel(adding: Running) -> Iterator[grpc.Channel]:
    options = [*ENDLESS, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{adding.grpc_port}", options) as made:
        yield made


def infer_request(numbers: Numbers) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(numbers), 1]}
    return pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[numbers.tobytes()])


def single(number: float) -> Numbers:
    return np.full(1, number, np.float32)


def output(answer: Any) -> Numbers:
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def test_concurrent_calls_on_one_channel_get_their_own_answers(channel: grpc.Channel) -> None:
    stub = GRPCInferenceServiceStub(channel)
    inputs = [np.full(1 + number % 3, -number, np.float32) for number in range(500)]
    calls = [stub.ModelInfer.future(infer_request(numbers), timeout=SECONDS) for numbers in inputs]
    for numbers, call in zip(inputs, calls, strict=True):
        np.testing.assert_array_equal(output(call.result()), numbers + 1)


@pytest.mark.parametrize("size", [1, 16_000, 17_000, 300_000, ROWS])
def test_messages_of_every_size(channel: grpc.Channel, size: int) -> None:
    numbers = -np.arange(size, dtype=np.float32)
    answer = GRPCInferenceServiceStub(channel).ModelInfer(infer_request(numbers), timeout=SECONDS)
    np.testing.assert_array_equal(output(answer), numbers + 1)


def test_client_with_small_windows_gets_whole_answers(adding: Running) -> None:
    options = [
        *ENDLESS,
        ("grpc.http2.lookahead_bytes", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", 16384),
    ]
    numbers = -np.arange(200_000, dtype=np.float32)
    with grpc.insecure_channel(f"127.0.0.1:{adding.grpc_port}", options) as channel:
        calls = [
            GRPCInferenceServiceStub(channel).ModelInfer.future(infer_request(numbers), timeout=SECONDS)
            for _ in range(4)
        ]
        for call in calls:
            np.testing.assert_array_equal(output(call.result()), numbers + 1)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_large_compressed_message(channel: grpc.Channel, compression: grpc.Compression) -> None:
    numbers = np.full(500_000, -7, np.float32)
    answer = GRPCInferenceServiceStub(channel).ModelInfer(
        infer_request(numbers), timeout=SECONDS, compression=compression
    )
    assert set(output(answer)) == {-6}


def test_memory_of_large_messages_is_limited(channel: grpc.Channel) -> None:
    stub = GRPCInferenceServiceStub(channel)
    numbers = -np.ones(ROWS, np.float32)
    calls = [stub.ModelInfer.future(infer_request(numbers), timeout=SECONDS) for _ in range(6)]
    codes = [call.code() for call in calls]
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert grpc.StatusCode.OK in codes
    np.testing.assert_array_equal(output(stub.ModelInfer(infer_request(numbers[:1]), timeout=SECONDS)), [0])


def test_keepalive_pings_are_answered(adding: Running) -> None:
    options = [
        ("grpc.keepalive_time_ms", 20),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{adding.grpc_port}", options) as channel:
        stub = GRPCInferenceServiceStub(channel)
        states: list[Any] = []
        channel.subscribe(states.append)
        long = stub.ModelInfer(infer_request(single(8)), timeout=SECONDS)  # takes a while
        assert output(long)[0] == 9
        assert output(stub.ModelInfer(infer_request(single(-1)), timeout=SECONDS))[0] == 0
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_cancelled_calls_do_not_affect_others(channel: grpc.Channel) -> None:
    stub = GRPCInferenceServiceStub(channel)
    calls = [stub.ModelInfer.future(infer_request(single(-number)), timeout=SECONDS) for number in range(300)]
    for call in calls[::2]:
        call.cancel()
    assert [output(call.result())[0] for call in calls[1::2]] == [1 - number for number in range(1, 300, 2)]
