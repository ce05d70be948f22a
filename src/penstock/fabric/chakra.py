"""Workloads as Chakra execution traces (MLCommons), which ASTRA-sim simulates and replay tools run: a file a rank.

The schema is `schema/protobuf/et_def.proto` of github.com/mlcommons/chakra at commit 6dc63e1, whose traces call
themselves 0.0.4; of it, what a list of transfers needs. A trace is a GlobalMetadata and then one Node after the other,
each message with its length in front as a varint.

The attributes are typed as both readers of ASTRA-sim take them. Its sizes of an all-gather are what each rank gives.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import ArgumentError, MissingExtraError
from penstock.fabric.steps import Collective
from penstock.fabric.workload import Transfer, Workload

VERSION = "0.0.4"

METADATA_NODE, COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 1, 4, 5, 6, 7
"""NodeType, as far as it is written here."""

COMM_TYPES: dict[Collective, int] = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
}
"""CollectiveCommType."""

_GIVES_A_PART = ("all_gather", "gather")
"""Collectives whose size in a Workload is of the result, of which each rank gives a part."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a trace, with its attributes by name."""

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...] = ()
    duration_micros: int = 0
    attributes: dict[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank does, in order."""

    version: str
    nodes: tuple[Node, ...]


def write_chakra(workload: Workload, folder: Path, hosts: int, name: str = "penstock") -> tuple[Path, ...]:
    """Writes `<name>.<rank>.et` for each rank, and `<name>.groups.json` with the members of each process group.

    Each node waits for the one before it on its rank, so that the order of the workload is kept. ASTRA-sim is given the
    traces as `--workload-configuration=<folder>/<name>` and the groups as `--comm-group-configuration`.

    Args:
        folder: is made if it is not there.
        hosts: how many ranks; that of the workload, if it is made for a number.

    Returns the files, the groups' last.

    Raises:
        ArgumentError: the workload is for another number of hosts.
        MissingExtraError: protobuf is not installed.
    """
    if hosts < 2 or workload.hosts not in (0, hosts):
        expected = workload.hosts or "2 or more"
        raise ArgumentError(f"hosts={hosts}: the workload {workload.name!r} is for {expected}; give that number")
    groups = process_groups(workload, hosts)
    messages = _messages()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for rank in range(hosts):
        path = folder / f"{name}.{rank}.et"
        with path.open("wb") as file:
            _write(file, messages["GlobalMetadata"](version=VERSION))
            for node in nodes_of(workload, rank, hosts, groups):
                _write(file, _encoded(messages, node))
        made.append(path)
    members = folder / f"{name}.groups.json"
    members.write_text(json.dumps({group: list(ranks) for ranks, group in groups.items()}, indent=2) + "\n")
    return *made, members


def read_chakra(path: Path) -> Trace:
    """What a file of `write_chakra` holds. Raises ArgumentError if it is no such file."""
    messages = _messages()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        with path.open("rb") as file:
            first, *rest = _read(file)
        metadata = messages["GlobalMetadata"].FromString(first)
        nodes = tuple(_decoded(messages["Node"].FromString(text)) for text in rest)
    except (OSError, ValueError, DecodeError) as error:
        raise ArgumentError(f"{path} is no Chakra execution trace: {error}") from None
    return Trace(metadata.version, nodes)


def process_groups(workload: Workload, hosts: int) -> dict[tuple[int, ...], str]:
    """The groups of ranks that have collectives, each with its name: a number, of which "0" is always all ranks."""
    groups: dict[tuple[int, ...], str] = {tuple(range(hosts)): "0"}
    for transfer in workload.transfers:
        if transfer.collective not in ("send", "sendrecv") and transfer.ranks:
            groups.setdefault(tuple(sorted(transfer.ranks)), str(len(groups)))
    return groups


def nodes_of(workload: Workload, rank: int, hosts: int, groups: dict[tuple[int, ...], str]) -> Iterator[Node]:
    """What a rank does, each node after the one before it."""
    number = 0
    before: tuple[int, ...] = ()

    def node(name: str, kind: int, seconds: float, attributes: dict[str, int | str] | None = None) -> Node:
        micros = math.ceil(round(seconds * 1e9) / 1000)
        return Node(number, name, kind, before, micros, {"is_cpu_op": False, **(attributes or {})})

    for tag, transfer in enumerate(workload.transfers):
        ranks = transfer.ranks or tuple(range(hosts))
        if rank not in ranks:
            continue
        seconds = transfer.compute_of(rank)
        if seconds:
            yield node(f"compute before {transfer.name}", COMP_NODE, seconds)
            before, number = (number,), number + 1
        made = _communication(transfer, ranks, rank, tag, groups)
        first = number
        for kind, attributes in made:  # none of them waits for another
            yield node(transfer.name, kind, 0, attributes)
            number += 1
        before = tuple(range(first, number))
    if workload.compute_seconds:
        yield node("compute after the last transfer", COMP_NODE, workload.compute_seconds)


def _communication(
    transfer: Transfer, ranks: tuple[int, ...], rank: int, tag: int, groups: dict[tuple[int, ...], str]
) -> list[tuple[int, dict[str, int | str]]]:
    """The types of a transfer's nodes on a rank, and their attributes."""
    if transfer.collective in ("send", "sendrecv"):
        place = ranks.index(rank)
        to_next = (rank, ranks[(place + 1) % len(ranks)])
        from_last = (ranks[place - 1], rank)
        both = [(COMM_SEND_NODE, to_next), (COMM_RECV_NODE, from_last)]
        return [
            (kind, {"comm_size": transfer.bytes, "comm_src": source, "comm_dst": target, "comm_tag": tag})
            for kind, (source, target) in (both if transfer.collective == "sendrecv" else both[place : place + 1])
        ]
    size = -(-transfer.bytes // len(ranks)) if transfer.collective in _GIVES_A_PART else transfer.bytes
    attributes: dict[str, int | str] = {
        "comm_type": COMM_TYPES[transfer.collective],
        "comm_size": size,
        "pg_name": groups[tuple(sorted(ranks))],
    }
    if transfer.collective in ("broadcast", "reduce", "gather", "scatter"):
        attributes["root"] = ranks[0]
    return [(COMM_COLL_NODE, attributes)]


# -- messages ---------------------------------------------------------------------------------------------------------

_FIELD_OF = {
    "comm_size": "int64_val",
    "comm_type": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "root": "int32_val",
    "pg_name": "string_val",
    "is_cpu_op": "bool_val",
}
"""In which field of an AttributeProto each attribute is: ASTRA-sim's first reader looks at no other."""

_SCHEMA = {
    "AttributeProto": "name:string:1 int32_val:int32:7 int64_val:int64:9 bool_val:bool:27 string_val:string:29",
    "GlobalMetadata": "version:string:1 attr:AttributeProto*:2",
    "Node": "id:uint64:1 name:string:2 type:int32:3 data_deps:uint64*:5 duration_micros:uint64:7 "
    "attr:AttributeProto*:10",
}
"""Fields as name:type:number, * where repeated. A NodeType is encoded like an int32."""

_VALUES = ("int32_val", "int64_val", "bool_val", "string_val")
"""The fields of AttributeProto of which one is given."""


@functools.cache
def _messages() -> dict[str, Any]:
    """The classes of the schema's messages. Raises MissingExtraError if protobuf is not installed."""
    try:  # other packages share the name `google`
        from google.protobuf import (  # type: ignore[import-untyped]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError:
        raise MissingExtraError("a Chakra trace needs protobuf: pip install 'penstock[fabric]'") from None
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


def _encoded(messages: dict[str, Any], node: Node) -> Any:
    attributes = [messages["AttributeProto"](name=k, **{_FIELD_OF[k]: v}) for k, v in node.attributes.items()]
    return messages["Node"](
        id=node.id,
        name=node.name,
        type=node.type,
        data_deps=node.data_deps,
        duration_micros=node.duration_micros,
        attr=attributes,
    )


def _decoded(message: Any) -> Node:
    attributes = {one.name: getattr(one, one.WhichOneof("value")) for one in message.attr}
    deps = tuple(message.data_deps)
    return Node(message.id, message.name, message.type, deps, message.duration_micros, attributes)


def _write(file: BinaryIO, message: Any) -> None:
    """A message after its length as a varint: seven bits a byte, the lowest first; the eighth: more follow."""
    text = message.SerializeToString(deterministic=True)
    left = len(text)
    while left > 127:
        file.write(bytes((left & 127 | 128,)))
        left >>= 7
    file.write(bytes((left,)) + text)


def _read(file: BinaryIO) -> Iterator[bytes]:
    """The messages' bytes. Raises ValueError where the file ends within one."""
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
