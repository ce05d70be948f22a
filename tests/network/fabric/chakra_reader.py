"""Reads Chakra traces back, by protobuf and the published schema: another way than that in which they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.network.fabric.chakra import Node

_SCHEMA = {
    "AttributeProto": "name:string:1 int32_val:int32:7 int64_val:int64:9 bool_val:bool:27 string_val:string:29",
    "GlobalMetadata": "version:string:1 attr:AttributeProto*:2",
    "Node": "id:uint64:1 name:string:2 type:int32:3 data_deps:uint64*:5 duration_micros:uint64:7 "
    "attr:AttributeProto*:10",
}
"""Fields as name:type:number, * where repeated. A NodeType is encoded like an int32."""

_VALUES = ("int32_val", "int64_val", "bool_val", "string_val")
"""The fields of AttributeProto of which one is given."""


@dataclass(frozen=True)
class Trace:
    """What one rank does, in order."""

    version: str
    nodes: tuple[Node, ...]


def read_chakra(path: Path) -> Trace:
    """What a file of `write_chakra` holds."""
    messages = _messages()
    with path.open("rb") as file:
        first, *rest = _read(file)
    metadata = messages["GlobalMetadata"].FromString(first)
    return Trace(metadata.version, tuple(_decoded(messages["Node"].FromString(text)) for text in rest))


def _messages() -> dict[str, Any]:
    """The classes of the schema's messages."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock/chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        if message == "AttributeProto":
            described.oneof_decl.add(name="value")
        for text in fields.split():
            name, kind, number = text.split(":")
            made = described.field.add(name=name, number=int(number))
            made.label = made.LABEL_REPEATED if kind.endswith("*") else made.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _SCHEMA:
                made.type, made.type_name = made.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                made.type = getattr(made, f"TYPE_{kind.upper()}")
            if message == "AttributeProto" and name in _VALUES:
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in _SCHEMA
    }


def _decoded(message: Any) -> Node:
    attributes = {one.name: getattr(one, one.WhichOneof("value")) for one in message.attr}
    deps = tuple(message.data_deps)
    return Node(message.id, message.name, message.type, deps, message.duration_micros, attributes)


def _read(file: BinaryIO) -> Iterator[bytes]:
    """The messages' bytes."""
    while first := file.read(1):
        length, shift = first[0] & 127, 7
        while first[0] & 128:
            first = file.read(1)
            if not first:
                raise ValueError("it ends within a length")
            length |= (first[0] & 127) << shift
            shift += 7
        text = file.read(length)
        if len(text) < length:
            raise ValueError("it ends within a message")
        yield text
