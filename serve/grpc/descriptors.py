"""Protobuf files built from short tables: their descriptors and message classes.

They are in a descriptor pool of their own: in protobuf's default pool they would collide with the same messages of
kserve and tritonclient when one process imports both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_POOL = DescriptorPool()


class ProtoFile:
    """A .proto file from its table, in which each line is one declaration.

    `message`, `enum` and `service` begin a block, and a dot in a name nests it. A field is `[repeated|map|oneof:NAME]
    TYPE NAME = NUMBER`, a value of an enum `NAME = NUMBER`, a method `rpc NAME [stream] REQUEST [stream] RESPONSE`.
    """

    def __init__(self, name: str, package: str, table: str) -> None:
        self.name, self.package = name, package
        _POOL.AddSerializedFile(_parse(name, package, table).SerializeToString())
        self.descriptor = _POOL.FindFileByName(name)
        self.proto = FileDescriptorProto()  # with the scopes and kinds of types that the pool has resolved
        self.descriptor.CopyToProto(self.proto)
        self.serialized: bytes = self.proto.SerializeToString()
        self.symbols = frozenset(_symbols(self.proto, package))

    def message_class(self, name: str) -> Any:
        return GetMessageClass(_POOL.FindMessageTypeByName(f"{self.package}.{name}"))


def _symbols(declared: Any, scope: str) -> Iterator[str]:
    """Yield the full names of what a file, message, enum or service declares."""
    for field, parts in declared.ListFields():
        if field.message_type is not None and field.is_repeated and "name" in field.message_type.fields_by_name:
            for part in parts:
                yield f"{scope}.{part.name}"
                yield from _symbols(part, f"{scope}.{part.name}")


def _parse(name: str, package: str, table: str) -> FileDescriptorProto:
    file = FileDescriptorProto(name=name, package=package, syntax="proto3")
    messages: dict[str, DescriptorProto] = {}
    block: DescriptorProto | EnumDescriptorProto | ServiceDescriptorProto | None = None
    for words in map(str.split, table.strip().splitlines()):
        if words[0] in ("message", "enum", "service"):
            parent, _, own_name = words[1].rpartition(".")
            if words[0] == "message":
                block = messages[own_name] = (messages[parent].nested_type if parent else file.message_type).add()
            elif words[0] == "enum":
                block = (messages[parent] if parent else file).enum_type.add()
            else:
                block = file.service.add()
            block.name = own_name
        elif isinstance(block, DescriptorProto):
            *label, type_name, field, _, number = words
            _add_field(block, "".join(label), type_name, field, int(number))
        elif isinstance(block, EnumDescriptorProto):
            block.value.add(name=words[0], number=int(words[2]))
        elif isinstance(block, ServiceDescriptorProto):
            _add_method(block, words[1:])
    return file


def _add_field(message: DescriptorProto, label: str, type_name: str, name: str, number: int) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    kind, _, oneof = label.partition(":")
    if kind == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0
    if label == "map":  # on the wire: repeated messages with a key and a value
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "", "string", "key", 1)
        _add_field(entry, "", type_name, "value", 2)
        type_name = entry.name
    if type_name[0].isupper():
        field.type_name = type_name  # protobuf finds its scope, and whether it is a message or an enum
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{type_name.upper()}")


def _add_method(service: ServiceDescriptorProto, words: list[str]) -> None:
    name, *rest = words
    types = [word for word in rest if word != "stream"]
    service.method.add(
        name=name,
        input_type=types[0],
        output_type=types[1],
        client_streaming=rest[0] == "stream",
        server_streaming=rest[-2] == "stream",
    )
