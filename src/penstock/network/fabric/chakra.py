"""Export workloads as Chakra execution traces (MLCommons), one file per rank, for ASTRA-sim and trace-replay tools.

The schema is `schema/protobuf/et_def.proto` of github.com/mlcommons/chakra at commit 6dc63e1, whose traces report
version 0.0.4. Only the parts that a list of transfers needs are written. A trace is a GlobalMetadata message followed
by Node messages, each prefixed with its length as a varint.

Attribute types are those that both of ASTRA-sim's readers accept. ASTRA-sim's all-gather size is each rank's
contribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock._base.errors import ArgumentError
from penstock._base.files import replacing, write_json
from penstock.network.fabric.steps import GATHERS, ROOTED, Collective
from penstock.network.fabric.workload import Transfer, Workload

VERSION = "0.0.4"

METADATA_NODE, COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 1, 4, 5, 6, 7
"""The NodeType values written here."""

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
"""Values of CollectiveCommType."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a trace; `attributes` are keyed by name."""

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...] = ()
    duration_micros: int = 0
    attributes: dict[str, bool | int | str] = field(default_factory=dict)


def write_chakra(workload: Workload, folder: Path, hosts: int) -> tuple[Path, ...]:
    """Write `penstock.<rank>.et` for each rank, and `penstock.groups.json` with the members of each process group.

    Each node depends on the previous node of its rank, which preserves the workload's order. ASTRA-sim takes the traces
    with `--workload-configuration=<folder>/penstock`, and the groups with `--comm-group-configuration`. Returns the
    files written, the groups file last. Raises ArgumentError: the workload needs a different number of hosts.
    """
    if hosts < 2 or workload.hosts not in (0, hosts):
        expected = workload.hosts or "2 or more"
        raise ArgumentError(f"hosts={hosts}: the workload {workload.name!r} is for {expected} hosts; pass that number")
    groups = process_groups(workload, hosts)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(hosts):
        path = folder / f"penstock.{rank}.et"
        messages = [_field(1, VERSION), *map(_encode, rank_nodes(workload, rank, hosts, groups))]
        with replacing(path) as new:
            new.write_bytes(b"".join(_varint(len(message)) + message for message in messages))
        paths.append(path)
    members = folder / "penstock.groups.json"
    write_json(members, {group: list(ranks) for ranks, group in groups.items()})
    return *paths, members


def process_groups(workload: Workload, hosts: int) -> dict[tuple[int, ...], str]:
    """Name each group of ranks that runs collectives, by a number in decimal; "0" is always the group of all ranks."""
    groups: dict[tuple[int, ...], str] = {tuple(range(hosts)): "0"}
    for transfer in workload.transfers:
        if transfer.collective not in ("send", "sendrecv") and transfer.ranks:
            groups.setdefault(tuple(sorted(transfer.ranks)), str(len(groups)))
    return groups


def rank_nodes(workload: Workload, rank: int, hosts: int, groups: dict[tuple[int, ...], str]) -> Iterator[Node]:
    """Yield the nodes of one rank, each depending on the one before it; a transfer's do not depend on each other."""
    steps: list[tuple[str, float, list[tuple[int, dict[str, int | str]]]]] = []
    for tag, transfer in enumerate(workload.transfers):
        ranks = transfer.members(hosts)
        if rank in ranks:
            if seconds := transfer.compute_on(rank):
                steps.append((f"compute before {transfer.name}", seconds, [(COMP_NODE, {})]))
            steps.append((transfer.name, 0.0, _communication(transfer, ranks, rank, tag, groups)))
    if workload.compute_seconds:
        steps.append(("compute after the last transfer", workload.compute_seconds, [(COMP_NODE, {})]))
    next_id, dependencies = 0, range(0)
    for name, seconds, parts in steps:
        micros = math.ceil(round(seconds * 1e9) / 1000)
        for node_id, (kind, attributes) in enumerate(parts, next_id):
            yield Node(node_id, name, kind, tuple(dependencies), micros, {"is_cpu_op": False, **attributes})
        dependencies = range(next_id, next_id + len(parts))
        next_id += len(parts)


def _communication(
    transfer: Transfer, ranks: tuple[int, ...], rank: int, tag: int, groups: dict[tuple[int, ...], str]
) -> list[tuple[int, dict[str, int | str]]]:
    """Return the types and attributes of a transfer's nodes on one rank."""
    if transfer.collective in ("send", "sendrecv"):
        index = ranks.index(rank)
        pair = [
            (COMM_SEND_NODE, (rank, ranks[(index + 1) % len(ranks)])),
            (COMM_RECV_NODE, (ranks[index - 1], rank)),
        ]
        return [
            (kind, {"comm_size": transfer.bytes, "comm_src": source, "comm_dst": target, "comm_tag": tag})
            for kind, (source, target) in (pair if transfer.collective == "sendrecv" else pair[index : index + 1])
        ]
    attributes: dict[str, int | str] = {
        "comm_type": COMM_TYPES[transfer.collective],
        "comm_size": -(-transfer.bytes // len(ranks)) if transfer.collective in GATHERS else transfer.bytes,
        "pg_name": groups[tuple(sorted(ranks))],
    }
    if transfer.collective in ROOTED:
        attributes["root"] = ranks[0]
    return [(COMM_COLL_NODE, attributes)]


# -- Protocol Buffers encoding ----------------------------------------------------------------------------------------

_VALUE_FIELD = {
    "comm_size": 9, "comm_type": 9, "comm_src": 7, "comm_dst": 7, "comm_tag": 7, "root": 7, "pg_name": 29,
    "is_cpu_op": 27,
}  # fmt: skip
"""The AttributeProto field of each attribute (int64_val, int32_val, string_val, bool_val).

ASTRA-sim's first reader looks in no other field.
"""


def _encode(node: Node) -> bytes:
    """Encode a Node, omitting fields that are 0."""
    attributes = [_field(1, name) + _field(_VALUE_FIELD[name], value) for name, value in node.attributes.items()]
    deps = b"".join(map(_varint, node.data_deps))
    fields: list[tuple[int, int | str | bytes]] = [
        (1, node.id), (2, node.name), (3, node.type), (5, deps), (7, node.duration_micros)
    ]  # fmt: skip
    fields += [(10, attribute) for attribute in attributes]
    return b"".join(_field(number, value) for number, value in fields if value)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Encode in base 128, lowest seven bits first; a byte's eighth bit says that more follow."""
    low = bytearray()
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])
