"""The reflection service of gRPC, by which clients such as grpcurl learn the services and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.grpc.descriptors import ProtoFile
from serve.grpc.streaming import MessageStream

_TABLE = """
message ServerReflectionRequest
  string host = 1
  oneof:message_request string file_by_filename = 3
  oneof:message_request string file_containing_symbol = 4
  oneof:message_request ExtensionRequest file_containing_extension = 5
  oneof:message_request string all_extension_numbers_of_type = 6
  oneof:message_request string list_services = 7
message ExtensionRequest
  string containing_type = 1
  int32 extension_number = 2
message ServerReflectionResponse
  string valid_host = 1
  ServerReflectionRequest original_request = 2
  oneof:message_response FileDescriptorResponse file_descriptor_response = 4
  oneof:message_response ExtensionNumberResponse all_extension_numbers_response = 5
  oneof:message_response ListServiceResponse list_services_response = 6
  oneof:message_response ErrorResponse error_response = 7
message FileDescriptorResponse
  repeated bytes file_descriptor_proto = 1
message ExtensionNumberResponse
  string base_type_name = 1
  repeated int32 extension_number = 2
message ListServiceResponse
  repeated ServiceResponse service = 1
message ServiceResponse
  string name = 1
message ErrorResponse
  int32 error_code = 1
  string error_message = 2
service ServerReflection
  rpc ServerReflectionInfo stream ServerReflectionRequest stream ServerReflectionResponse
"""
# The two versions differ in their names only.
FILES = [
    ProtoFile(f"grpc/reflection/{version}/reflection.proto", f"grpc.reflection.{version}", _TABLE)
    for version in ("v1", "v1alpha")
]
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # codes of gRPC


class Reflection:
    """One version of the service."""

    def __init__(self, version: ProtoFile, files: Sequence[ProtoFile]) -> None:
        """`files` are those that it describes; none of them imports another."""
        self.request_class = version.message_class("ServerReflectionRequest")
        self._response_class = version.message_class("ServerReflectionResponse")
        self._files = files
        self._services = [f"{file.package}.{name}" for file in files for name in file.descriptor.services_by_name]

    def respond(self, request: Any) -> Any:
        response = self._response_class(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        elif kind in ("file_by_filename", "file_containing_symbol"):
            name = getattr(request, kind)
            file = next((file for file in self._files if name == file.name or name in file.symbols), None)
            if file is None:
                response.error_response.error_code = _NOT_FOUND
                response.error_response.error_message = f"no file or symbol {name[:200]!r}"
            else:
                response.file_descriptor_response.file_descriptor_proto.append(file.serialized)
        else:
            response.error_response.error_code = _UNIMPLEMENTED
            response.error_response.error_message = "these files have no extensions (proto3)"
        return response


class Conversation:
    """One call: each message is answered when it arrives."""

    def __init__(self, reflection: Reflection, stream: MessageStream) -> None:
        self._reflection, self._stream = reflection, stream

    def on_message(self, message: Any) -> None:
        self._stream.send(self._reflection.respond(message))

    def on_end(self) -> None:
        self._stream.end(None)

    def close(self) -> None:
        """Hold nothing that has to be released."""
