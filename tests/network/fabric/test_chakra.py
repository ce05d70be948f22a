"""Chakra traces: their bytes, decoded here by hand, are the published schema's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.network.fabric import chakra
from penstock.network.fabric.workload import Transfer, Workload, mlp

PIPELINE = Workload(
    "two replicas of a pipeline of two",
    (
        Transfer("F0 stage 0->1", 640, "send", (0, 1), 0.0015, "activation"),
        Transfer("B0 stage 1->0", 640, "send", (1, 0), 0.0, "activation gradient"),
        Transfer("parameters", 4096, "all_gather", (1, 3), 0.0, "parameters"),
        Transfer("stage 0", 2600, "all_reduce", (0, 2), 2.5e-7),
        Transfer("loss", 4, "broadcast", (3, 0, 1, 2)),
    ),
    hosts=4,
    compute_seconds=0.01,
)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message, from the wire format alone."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            assert key & 7 == 2, "numbers and bytes only"
            length, at = varint(data, at)
            yield key >> 3, data[at : at + length]
            at += length


def by_hand(data: bytes) -> list[dict[int, list[int | bytes]]]:
    """Every message of a trace: field number -> values."""
    messages, at = [], 0
    while at < len(data):
        length, at = varint(data, at)
        found: dict[int, list[int | bytes]] = {}
        for number, value in fields(data[at : at + length]):
            found.setdefault(number, []).append(value)
        messages.append(found)
        at += length
    return messages


def attributes(message: dict[int, list[int | bytes]]) -> dict[bytes, tuple[int, int | bytes]]:
    """By name: the number of the field in which the value is, and the value."""
    every = [tuple(fields(one)) for one in message[10]]
    assert all(named == 1 for (named, _), _ in every)
    return {bytes(name): (number, value) for (_, name), (number, value) in every}


def read_chakra(path: Path) -> list[chakra.Node]:
    """The nodes of a trace, by the schema's field numbers."""
    nodes = []
    for message in by_hand(path.read_bytes())[1:]:
        ((name,), (kind,)), packed = (message[number] for number in (2, 3)), bytes(*message.get(5, []))
        deps, at = [], 0
        while at < len(packed):
            dep, at = varint(packed, at)
            deps.append(dep)
        values = attributes(message).items()
        texts = {text.decode(): value.decode() if number == 29 else value for text, (number, value) in values}
        (number,), (micros,) = message.get(1, [0]), message.get(7, [0])
        nodes.append(chakra.Node(number, name.decode(), kind, tuple(deps), micros, texts))
    return nodes


def test_a_file_a_rank_and_one_of_the_groups(tmp_path):
    files = chakra.write_chakra(mlp(), tmp_path / "new", 4)
    assert [file.name for file in files] == [*(f"penstock.{rank}.et" for rank in range(4)), "penstock.groups.json"]
    nodes = read_chakra(files[2])
    assert [(node.name, node.type, node.data_deps) for node in nodes] == [
        ("fc4", chakra.COMM_COLL_NODE, ()),
        ("fc3", chakra.COMM_COLL_NODE, (0,)),
        ("fc2", chakra.COMM_COLL_NODE, (1,)),
        ("fc1", chakra.COMM_COLL_NODE, (2,)),
    ]
    assert [node.attributes["comm_size"] for node in nodes] == [2600, 33024, 131584, 803840]
    assert {node.attributes["pg_name"] for node in nodes} == {"0"}
    *_, members = chakra.write_chakra(PIPELINE, tmp_path, 4)
    assert json.loads(members.read_text()) == {"0": [0, 1, 2, 3], "1": [1, 3], "2": [0, 2]}


def test_each_rank_has_its_own_part_in_order(tmp_path):
    by_rank = [read_chakra(file) for file in chakra.write_chakra(PIPELINE, tmp_path, 4)[:4]]
    names = [[node.name for node in nodes] for nodes in by_rank]
    last = "compute after the last transfer"
    waits = ["compute before F0 stage 0->1", "F0 stage 0->1", "B0 stage 1->0"]
    assert names == [
        [*waits, "compute before stage 0", "stage 0", "loss", last],
        [*waits, "parameters", "loss", last],
        ["compute before stage 0", "stage 0", "loss", last],
        ["parameters", "loss", last],
    ]
    roots = [[node.attributes["root"] for node in nodes if "root" in node.attributes] for nodes in by_rank]
    assert roots == [[3]] * 4, "the first of a transfer's ranks"
    assert by_rank[2][0].duration_micros == 1, "of a quarter: with none, it would not be there"
    ends = [
        [(node.type, *(node.attributes[f"comm_{key}"] for key in ("tag", "src", "dst", "size"))) for node in nodes[1:3]]
        for nodes in by_rank[:2]
    ]
    send, receive = chakra.COMM_SEND_NODE, chakra.COMM_RECV_NODE
    assert ends == [[(send, 0, 0, 1, 640), (receive, 1, 1, 0, 640)], [(receive, 0, 0, 1, 640), (send, 1, 1, 0, 640)]]


def test_the_bytes_are_those_of_the_schema(tmp_path):
    """Field numbers of et_def.proto, and the types that ASTRA-sim's first reader looks for: int64_val is 9, ..."""
    data = chakra.write_chakra(PIPELINE, tmp_path, 4)[0].read_bytes()
    assert data[:8] == b"\x07\x0a\x050.0.4"  # seven bytes: field 1, a string of five
    _, compute, send, receive, _, reduce, *_ = by_hand(data)
    # Node: id = 1, name = 2, type = 3, data_deps = 5, duration_micros = 7, attr = 10; what is 0 is not written
    assert compute == {2: [b"compute before F0 stage 0->1"], 3: [4], 7: [1500], 10: compute[10]}
    assert attributes(compute) == {b"is_cpu_op": (27, 0)}
    assert (send[1], send[2], send[3], send[5]) == ([1], [b"F0 stage 0->1"], [5], [b"\x00"])  # deps are packed
    assert attributes(send) == {
        b"is_cpu_op": (27, 0),
        b"comm_size": (9, 640),
        b"comm_src": (7, 0),
        b"comm_dst": (7, 1),
        b"comm_tag": (7, 0),
    }
    assert (receive[3], attributes(receive)[b"comm_src"], attributes(receive)[b"comm_tag"]) == ([6], (7, 1), (7, 1))
    assert reduce[3] == [7]
    assert attributes(reduce) == {
        b"is_cpu_op": (27, 0),
        b"comm_type": (9, 0),
        b"comm_size": (9, 2600),
        b"pg_name": (29, b"2"),
    }


@pytest.mark.parametrize(
    ("collective", "number", "size"),
    [
        ("all_reduce", 0, 400),
        ("all_gather", 2, 134),  # what each of three ranks gives
        ("gather", 3, 134),
        ("reduce", 1, 400),
        ("scatter", 4, 400),
        ("broadcast", 5, 400),
        ("all_to_all", 6, 400),
        ("reduce_scatter", 7, 400),
    ],
)
def test_collectives_by_the_schemas_numbers(tmp_path, collective, number, size):
    file = chakra.write_chakra(Workload("one", (Transfer("x", 400, collective),)), tmp_path, 3)[0]
    (node,) = read_chakra(file)
    assert (node.attributes["comm_type"], node.attributes["comm_size"]) == (number, size)


def test_both_ways_at_once_are_a_send_and_a_receive_that_do_not_wait_for_each_other(tmp_path):
    workload = Workload("ring", (Transfer("x", 400, "sendrecv"), Transfer("y", 400)))
    for rank, file in enumerate(chakra.write_chakra(workload, tmp_path, 3)[:3]):
        send, receive, after = read_chakra(file)
        assert (send.type, receive.type) == (chakra.COMM_SEND_NODE, chakra.COMM_RECV_NODE)
        ends = [(node.attributes["comm_src"], node.attributes["comm_dst"]) for node in (send, receive)]
        assert ends == [(rank, (rank + 1) % 3), ((rank - 1) % 3, rank)]
        assert [node.data_deps for node in (send, receive, after)] == [(), (), (0, 1)]


def test_bad_input(tmp_path):
    with pytest.raises(ArgumentError, match=r"hosts=3: .* is for 4"):
        chakra.write_chakra(PIPELINE, tmp_path, 3)
