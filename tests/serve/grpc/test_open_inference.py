"""The messages of the protocol, against those that kserve publishes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from serve.grpc import open_inference

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
    pool = DescriptorPool()
    pool.AddSerializedFile(open_inference.file_descriptor().SerializeToString())
    file = pool.FindFileByName("open_inference_grpc.proto")
    ours, published = (
        set(_fields(file.message_types_by_name.values())),
        set(_fields(pb.DESCRIPTOR.message_types_by_name.values())),
    )
    assert published - ours == set()
    entry = "ModelMetadataResponse.PropertiesEntry"
    assert {field[:3] for field in ours - published} == NEWER | {(entry, "key", 1), (entry, "value", 2)}


def test_every_method_is_that_of_the_published_service() -> None:
    published = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(published)
    (service,) = published.service
    assert f"{published.package}.{service.name}" == open_inference.SERVICE
    assert {method.name: method.input_type for method in service.method} == {
        name: f".inference.{name}Request" for name in open_inference.METHODS
    }


def test_a_process_may_import_the_clients_messages_as_well() -> None:
    message = open_inference.ModelInferRequest(model_name="m", id="7")
    message.parameters["timeout"].int64_param = 5
    assert pb.ModelInferRequest.FromString(message.SerializeToString()).parameters["timeout"].int64_param == 5
