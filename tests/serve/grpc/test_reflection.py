"""The reflection service, called with the client code of grpcio-reflection."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.serve.load_clients import SECONDS

if TYPE_CHECKING:
    from tests.serve.conftest import Running

SERVICES = [
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
]


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


def test_client_calls_a_method_that_it_knows_by_reflection_only(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert list(database.get_services()) == SERVICES
    pool = DescriptorPool(database)
    service = pool.FindServiceByName(SERVICES[0])
    method = service.methods_by_name["RepositoryIndex"]
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type).SerializeToString,
        GetMessageClass(method.output_type).FromString,
    )
    answer = call(GetMessageClass(method.input_type)(ready=True), timeout=SECONDS)
    assert [(one.name, one.state) for one in answer.models] == [("tiny", "READY")]
    watch = pool.FindServiceByName(SERVICES[1]).methods_by_name["Watch"]
    assert (watch.client_streaming, watch.server_streaming) == (False, True)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_conversation_stays_open_and_answers_each_message(channel: grpc.Channel, version: str) -> None:
    """grpcurl sends each request after the answer to the last one."""
    requests: queue.Queue[Any] = queue.Queue()
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )
    answers = call(iter(requests.get, None), timeout=SECONDS)
    requests.put(pb.ServerReflectionRequest(host="here", list_services=""))
    answer = next(answers)
    assert (answer.valid_host, answer.original_request.host) == ("here", "here")
    assert [service.name for service in answer.list_services_response.service] == SERVICES
    requests.put(pb.ServerReflectionRequest(file_by_filename="open_inference_grpc.proto"))
    (file,) = next(answers).file_descriptor_response.file_descriptor_proto
    for symbol in (
        SERVICES[0],
        f"{SERVICES[0]}.ModelInfer",
        "inference.ModelInferRequest.InferInputTensor",
        "inference.ModelInferRequest.inputs",
    ):
        requests.put(pb.ServerReflectionRequest(file_containing_symbol=symbol))
        assert list(next(answers).file_descriptor_response.file_descriptor_proto) == [file]
    requests.put(None)
    assert next(answers, None) is None
    assert answers.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        ({"file_by_filename": "other.proto"}, grpc.StatusCode.NOT_FOUND),
        ({"file_containing_symbol": "inference.Other"}, grpc.StatusCode.NOT_FOUND),
        ({"all_extension_numbers_of_type": SERVICES[0]}, grpc.StatusCode.UNIMPLEMENTED),
        ({"file_containing_extension": {"containing_type": "a", "extension_number": 1}}, grpc.StatusCode.UNIMPLEMENTED),
        ({}, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_unknown_names_and_extensions_get_an_error_response(
    channel: grpc.Channel, request_fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    request = pb.ServerReflectionRequest(**request_fields)
    (answer,) = ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=SECONDS)
    assert answer.error_response.error_code == code.value[0]


def test_client_that_opens_no_window_loses_its_call(channel: grpc.Channel, server: Running) -> None:
    """Answers are not queued: a client that reads none of them would fill the memory."""
    options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    request = pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as slow:
        answers = ServerReflectionStub(slow).ServerReflectionInfo(iter([request] * 1000), timeout=SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the client takes no more messages of this call"
