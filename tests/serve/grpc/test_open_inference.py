"""The messages of the protocol equal those that kserve publishes, and Triton's, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from serve.grpc import open_inference

TRITON = ("RepositoryIndex", "ModelStatistics", "InferStatistics", "InferBatchStatistics", "StatisticDuration")
NEWER = {  # in the published protocol, and not yet in kserve's package
    ("ModelMetadataResponse", "properties", 6),
    ("InferParameter", "double_param", 4),
    ("InferParameter", "uint64_param", 5),
}


def _fields(messages: Iterable[Descriptor]) -> Iterator[tuple[Any, ...]]:
    for message in messages:
        yield from _fields(message.nested_types)
        for field in message.fields:
            of = field.message_type.full_name if field.message_type else ""
            group = field.containing_oneof.name if field.containing_oneof else ""
            is_map = message.GetOptions().map_entry
            identity = (message.full_name.removeprefix("inference."), field.name, field.number)
            yield (*identity, field.type, field.is_repeated, of, group, is_map)


def test_every_field_is_that_of_the_published_protocol() -> None:
    ours, published = (
        set(_fields(open_inference.FILE.descriptor.message_types_by_name.values())),
        set(_fields(pb.DESCRIPTOR.message_types_by_name.values())),
    )
    assert published - ours == set()
    entry = "ModelMetadataResponse.PropertiesEntry"
    more = {field[:3] for field in ours - published if not field[0].startswith(TRITON)}
    assert more == NEWER | {(entry, "key", 1), (entry, "value", 2)}


def test_every_field_of_an_extension_is_that_of_triton() -> None:
    published = _of_triton("[m.SerializeToString().hex() for m in file.message_type]")
    messages = {message.name: message for message in map(_message, published)}
    ours = [message for message in open_inference.FILE.proto.message_type if message.name.startswith(TRITON)]
    assert len(ours) == 8
    for message in ours:
        theirs = messages[message.name]
        for field in (*message.field, *theirs.field):
            field.ClearField("json_name")
        fields = {field.SerializeToString() for field in message.field}
        missing = {field.name for field in theirs.field if field.SerializeToString() not in fields}
        assert missing == ({"memory_usage"} if message.name == "ModelStatistics" else set()), message.name


def test_every_method_of_triton_is_answered_or_refused_by_name() -> None:
    methods = _of_triton("[method.name for method in file.service[0].method]")
    assert set(methods) == {*open_inference.METHODS, *open_inference.REFUSED}


def _message(data: str) -> DescriptorProto:
    message: DescriptorProto = DescriptorProto.FromString(bytes.fromhex(data))
    return message


def _of_triton(expression: str) -> Any:
    code = (
        "import json; from google.protobuf.descriptor_pb2 import FileDescriptorProto\n"
        "from tritonclient.grpc import service_pb2; file = FileDescriptorProto()\n"
        f"service_pb2.DESCRIPTOR.CopyToProto(file); print(json.dumps({expression}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


def test_every_method_is_that_of_the_published_service() -> None:
    published = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(published)
    (service,) = published.service
    assert f"{published.package}.{service.name}" == open_inference.SERVICE
    assert {method.name: method.input_type for method in service.method} == {
        name: f".inference.{name}Request" for name in open_inference.METHODS if not name.startswith(TRITON)
    }


@pytest.mark.parametrize(
    "symbol",
    [
        "inference.GRPCInferenceService.ModelInfer",
        "inference.ModelInferRequest.InferInputTensor.datatype",
        "inference.InferParameter.parameter_choice",
    ],
)
def test_symbols_have_their_full_names(symbol: str) -> None:
    assert symbol in open_inference.FILE.symbols


def test_a_process_may_import_the_clients_messages_as_well() -> None:
    message = open_inference.ModelInferRequest(model_name="m", id="7")
    message.parameters["timeout"].int64_param = 5
    assert pb.ModelInferRequest.FromString(message.SerializeToString()).parameters["timeout"].int64_param == 5
