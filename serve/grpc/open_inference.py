"""The protobuf messages of the Open Inference Protocol, and its service with the methods of Triton's repository.

The messages are built from the table below in a descriptor pool of their own: in protobuf's default pool they would
collide with the same messages of kserve and tritonclient when one process imports both.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "inference"
_MESSAGES = """
message ServerLiveRequest
message ServerLiveResponse
  bool live = 1
message ServerReadyRequest
message ServerReadyResponse
  bool ready = 1
message ModelReadyRequest
  string name = 1
  string version = 2
message ModelReadyResponse
  bool ready = 1
message ServerMetadataRequest
message ServerMetadataResponse
  string name = 1
  string version = 2
  repeated string extensions = 3
message ModelMetadataRequest
  string name = 1
  string version = 2
message ModelMetadataResponse
  string name = 1
  repeated string versions = 2
  string platform = 3
  repeated TensorMetadata inputs = 4
  repeated TensorMetadata outputs = 5
  map string properties = 6
message ModelMetadataResponse.TensorMetadata
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
message ModelInferRequest
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated InferInputTensor inputs = 5
  repeated InferRequestedOutputTensor outputs = 6
  repeated bytes raw_input_contents = 7
message ModelInferRequest.InferInputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
message ModelInferRequest.InferRequestedOutputTensor
  string name = 1
  map InferParameter parameters = 2
message ModelInferResponse
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated InferOutputTensor outputs = 5
  repeated bytes raw_output_contents = 6
message ModelInferResponse.InferOutputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
message InferParameter
  oneof bool bool_param = 1
  oneof int64 int64_param = 2
  oneof string string_param = 3
  oneof double double_param = 4
  oneof uint64 uint64_param = 5
message InferTensorContents
  repeated bool bool_contents = 1
  repeated int32 int_contents = 2
  repeated int64 int64_contents = 3
  repeated uint32 uint_contents = 4
  repeated uint64 uint64_contents = 5
  repeated float fp32_contents = 6
  repeated double fp64_contents = 7
  repeated bytes bytes_contents = 8
message RepositoryModelLoadRequest
  string model_name = 1
message RepositoryModelLoadResponse
  string model_name = 1
  bool isLoaded = 2
message RepositoryModelUnloadRequest
  string model_name = 1
message RepositoryModelUnloadResponse
  string model_name = 1
  bool isUnloaded = 2
"""
_ONEOF = "parameter_choice"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"
METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)


def file_descriptor() -> FileDescriptorProto:
    """Return the table as protobuf describes a .proto file."""
    file = FileDescriptorProto(name="open_inference_grpc.proto", package=_PACKAGE, syntax="proto3")
    messages: dict[str, DescriptorProto] = {}
    for words in map(str.split, _MESSAGES.strip().splitlines()):
        if words[0] == "message":
            parent, _, name = words[1].rpartition(".")
            message = messages[parent].nested_type.add() if parent else file.message_type.add()
            message.name, messages[name] = name, message
        else:
            *label, type_name, name, _, number = words
            _add_field(message, "".join(label), type_name, name, int(number))
    return file


def _add_field(message: DescriptorProto, label: str, type_name: str, name: str, number: int) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONEOF)
        field.oneof_index = 0
    if label == "map":  # on the wire: repeated messages with a key and a value
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "", "string", "key", 1)
        _add_field(entry, "", type_name, "value", 2)
        type_name = entry.name
    if type_name[0].isupper():
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, type_name  # protobuf finds its scope
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{type_name.upper()}")


_POOL = DescriptorPool()
_POOL.AddSerializedFile(file_descriptor().SerializeToString())


def message_class(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelMetadataResponse = message_class("ModelMetadataResponse")
ModelReadyResponse = message_class("ModelReadyResponse")
ServerLiveResponse = message_class("ServerLiveResponse")
ServerMetadataResponse = message_class("ServerMetadataResponse")
ServerReadyResponse = message_class("ServerReadyResponse")
