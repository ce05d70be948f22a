"""The switch's loop against its rules written once more in plain Python, and each rule by an example.

Times are made up, but for the last tests, where sockets stand in for the hosts' devices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from switch_by_hand import Given, Network, Taken

from penstock._base.compiled import folder
from penstock.network.frame_fates import LOST, FrameFates
from penstock.network.parse import parse_link
from penstock.network.switch import columns, loop, serve
from penstock.network.switch.client import Setup
from penstock.network.switch.filling import DecisionBuffer, counters, create_tables
from penstock.network.topology import State, Topology

HOSTS = 3
MS = 1_000_000
GBIT_NS = 8
"""Of a byte at 1gbit."""


class Compiled:
    """The compiled loop's functions, driven by a made-up clock."""

    def __init__(self, topology: Topology, hosts: int = HOSTS) -> None:
        self.t = create_tables(topology, [-1] * hosts, 0)
        self.decided = DecisionBuffer(self.t, topology)
        self._sent: dict[int, bytes] = {}
        self.taken: list[Taken] = []

    def gone(self, *hosts: int) -> None:
        self.t.lines[: self.t.affects.shape[0], columns.GONE] = [
            host in hosts for host in range(self.t.affects.shape[0])
        ]

    def near(self, host: int, frames: Sequence[tuple[int, int]]) -> None:
        line = self.t.lines[self.t.affects.shape[0] + host]
        for at, size in frames:
            self.t.near[host, line[columns.NEAR_MADE] % self.t.near.shape[1]] = at, size
            line[columns.NEAR_MADE] += 1

    def play(self, frames: Sequence[Given]) -> list[Taken]:
        for number, frame in enumerate(frames):
            self.until(frame.at)
            self._come(number, frame)
        self.until(None)
        return self.taken

    def until(self, end: int | None) -> None:
        t = self.t
        while t.state[columns.WAITING] and (end is None or t.heap[0, columns.DUE_NS] <= end):
            due = int(t.heap[0, columns.DUE_NS])
            what = int(loop.pop(t))
            slot = what >> 1
            if not what & 1:
                loop._at_port(t, slot, due)
                continue
            target = int(t.slots[slot, columns.TARGET])
            if t.lines[target, columns.GONE]:
                t.lines[t.affects.shape[0] + target, columns.N_GONE] += 1
            else:
                self._take(due, target, t.frames[slot, : t.slots[slot, columns.LENGTH]].tobytes())
            loop._drop(t, slot)

    def _come(self, number: int, frame: Given) -> None:
        t = self.t
        t.state[columns.SPARES] -= 1
        slot = int(t.slots[t.state[columns.SPARES], columns.SPARE])
        data = self._sent[number] = number.to_bytes(14) + os.urandom(frame.size - 14)
        t.frames[slot, : frame.size] = np.frombuffer(data, dtype=np.uint8)
        t.slots[slot, [columns.LENGTH, columns.SOURCE, columns.TARGET]] = frame.size, frame.source, frame.target
        loop._forward(t, slot, loop._arrival(t, slot, frame.at))

    def _take(self, due: int, target: int, data: bytes) -> None:
        number = int.from_bytes(data[:14])
        sent = self._sent[number]
        assert len(data) == len(sent)
        pairs = np.frombuffer(data, dtype=np.uint8) ^ np.frombuffer(sent, dtype=np.uint8)
        wrong = np.flatnonzero(np.unpackbits(pairs, bitorder="little")).tolist()
        self.taken.append(Taken(due, number, target, tuple(wrong)))


def _topology(text: str, own: dict[int, str] | None = None, seed: int = 1) -> Topology:
    return Topology(parse_link(text), {host: parse_link(one) for host, one in (own or {}).items()}, seed)


def _told(network: Network) -> list[dict[str, dict[str, int]]]:
    names = [*columns.COUNTED]
    return [
        {way: {name: line.told[name] for name in names} for way, line in (("up", up), ("down", down))}
        for up, down in zip(network.ups, network.downs, strict=True)
    ]


def _assert_as_by_hand(
    topology: Topology,
    frames: Sequence[Given],
    hosts: int = HOSTS,
    near: dict[int, list[tuple[int, int]]] | None = None,
    gone: Sequence[int] = (),
) -> list[Taken]:
    """What comes by the loop, once it has turned out to be what comes by hand."""
    by_loop, by_hand = Compiled(topology, hosts), Network(topology, hosts)
    for host, background in (near or {}).items():
        by_loop.near(host, background)
        by_hand.near[host] = list(background)
    by_loop.gone(*gone)
    by_hand.gone = set(gone)
    expected = by_hand.play(frames)
    assert by_loop.play(frames) == expected
    assert counters(by_loop.t)["links"] == _told(by_hand)
    # Nothing of the memory is lost, and nothing of it is in two hands.
    slots = by_loop.t.slots
    assert by_loop.t.state[columns.SPARES] == len(slots)
    assert sorted(slots[:, columns.SPARE]) == list(range(len(slots)))
    return expected


IMPAIRMENTS = [
    "delay 3ms jitter 2ms overtaking reorder 20%",
    "",
    "delay 3ms",
    "delay 5ms jitter 2ms distribution pareto loss 10% duplicate 10% corrupt 20% reorder 20%",
    "delay 1ms jitter 3ms distribution normal stall 2ms every 7ms",
    "stall 5ms every 6ms loss gemodel 20% 30%",
    "up 1gbit delay 1ms loss 5% limit 4kb down 100mbit stall 1ms every 3ms reorder 20% delay 1ms limit 5kb",
]
LINKS = [
    text if text.startswith("up") else f"{rate} {text} limit {limit}"
    for text in IMPAIRMENTS
    for rate, limit in (("1gbit", "3kb"), ("100mbit", "20kb"))
]


@st.composite
def _frames(draw: st.DrawFn) -> list[Given]:
    at, found = 0, []
    for gap, source, hop, size in draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 0, 1, 700, 12_112, 100_000, 2 * MS]),
                st.integers(0, HOSTS - 1),
                st.integers(1, HOSTS - 1),
                st.sampled_from([60, 61, 700, 1514]),
            ),
            max_size=60,
        )
    ):
        at += gap
        found.append(Given(at, source, (source + hop) % HOSTS, size))
    return found


NEAR = st.lists(st.tuples(st.integers(0, 20 * MS), st.sampled_from([64, 1514, 9000])), max_size=20).map(sorted)


@settings(max_examples=100)
@given(
    link=st.sampled_from(LINKS),
    own=st.dictionaries(st.integers(0, HOSTS - 1), st.sampled_from(LINKS), max_size=2),
    seed=st.integers(0, 99),
    frames=_frames(),
    near=st.dictionaries(st.integers(0, HOSTS - 1), NEAR),
    gone=st.lists(st.integers(0, HOSTS - 1), max_size=1),
)
def test_the_loop_does_what_its_rules_say(
    link: str,
    own: dict[int, str],
    seed: int,
    frames: list[Given],
    near: dict[int, list[tuple[int, int]]],
    gone: list[int],
) -> None:
    _assert_as_by_hand(_topology(link, own, seed), frames, near=near, gone=gone)


def test_a_queue_holds_its_limit_and_no_more() -> None:
    frames = [Given(0, 0, 1, 1514) for _ in range(10)]
    narrow = _topology(f"up 1000gbit down 1gbit limit {5 * 1514}")
    assert [one.number for one in _assert_as_by_hand(narrow, frames)] == [0, 1, 2, 3, 4]
    later = [*frames, Given(2 * 1514 * GBIT_NS, 0, 1, 1514)]
    assert [one.number for one in _assert_as_by_hand(narrow, later)] == [0, 1, 2, 3, 4, 10]


def test_own_links_are_met_in_either_direction_and_both_between_two() -> None:
    topology = _topology("1gbit delay 1ms", {1: "1gbit delay 10ms", 2: "1gbit delay 20ms"})
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (0, 3), (3, 0)]
    frames = [Given(100 * MS * place, source, target, 60) for place, (source, target) in enumerate(pairs)]
    taken = _assert_as_by_hand(topology, frames, hosts=4)
    took = [round((one.at - frame.at) / MS) for one, frame in zip(taken, frames, strict=True)]
    assert took == [10, 10, 20, 20, 30, 30, 1, 1]


def test_other_links_from_now_on_leave_frames_under_way_as_they_are() -> None:
    network = Compiled(_topology("1gbit delay 10ms"))
    network._come(0, Given(0, 0, 1, 60))
    later = _topology("1gbit delay 1ms loss 50%")
    DecisionBuffer(network.t, later, epoch=1)
    fate = FrameFates(later.link.impairment, 1, 0 + 2 * HOSTS).next(100).fate
    for number in range(1, 101):
        network._come(number, Given(number * 1000, 0, 1, 60))
    network.until(None)
    assert network.taken[0] == Taken(10 * MS + 60 * GBIT_NS, 0, 1)
    assert [one.number for one in network.taken[1:]] == [k + 1 for k in range(100) if not fate[k] & LOST]
    assert all(one.at > 10 * MS for one in network.taken)  # in order, so not before the one that came first


class Wires:
    """The whole loop over sockets in place of devices."""

    def __init__(self, topology: Topology, hosts: int = HOSTS) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(hosts)]
        self._ends, self._hosts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for one in (*self._ends, *self._hosts):
            one.setblocking(False)
        self.t = create_tables(topology, [end.fileno() for end in self._ends], time.monotonic_ns())
        self.decided = DecisionBuffer(self.t, topology)

    def __enter__(self) -> Wires:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (*self._ends, *self._hosts):
            one.close()

    def send(self, source: int, target: int, number: int, size: int = 100) -> None:
        """To 255: all."""
        address = bytes(5) + bytes([target + 1]) if target != 255 else b"\xff" * 6
        head = address + bytes(8) + number.to_bytes(4)
        self._hosts[source].send(head + bytes(size - len(head)))

    def pass_on(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not done():
            assert time.monotonic() < deadline, "not within 30 s"
            loop.run(self.t, time.monotonic_ns() + 5 * MS)
            self.decided.fill()
            self.t.state[columns.LOW] = 0

    def is_idle(self) -> bool:
        return not self.t.state[columns.WAITING]

    def came(self, host: int) -> list[bytes]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._hosts[host].recv(4096))
        return found

    def counters(self) -> dict[str, dict[str, int]]:
        return counters(self.t)["links"]

    def exchange(self, frames: Sequence[tuple[int, int]], hosts: int = HOSTS) -> list[list[bytes]]:
        """All frames one after the other; what comes at each host."""
        came: list[list[bytes]] = [[] for _ in range(hosts)]
        for number, (source, target) in enumerate(frames):
            self.send(source, target, number)
            if number % 20 == 19 or number == len(frames) - 1:  # a socket holds some hundred
                read = self.t.state[columns.READS] + number % 20 + 1
                self.pass_on(lambda read=read: self.t.state[columns.READS] >= read and self.is_idle())
                for host in range(hosts):
                    came[host] += self.came(host)
        return came


def _numbers(frames: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(frame[14:18]) for frame in frames]


@pytest.fixture
def three() -> Iterator[Wires]:
    with Wires(_topology("1gbit delay 2ms")) as wires:
        yield wires


def test_a_frame_to_all_gets_to_all_others(three: Wires) -> None:
    came = three.exchange([(1, 255)])
    assert [_numbers(frames) for frames in came] == [[0], [], [0]]
    assert three.t.state[columns.SPARES] == len(three.t.slots)


def test_a_frame_of_nothing_but_a_header_ends_no_loop(three: Wires) -> None:
    three._hosts[0].send(bytes(5) + b"\x02" + bytes(8))
    three.send(0, 1, 9)
    three.pass_on(lambda: three.t.state[columns.READS] >= 1 and three.is_idle())
    assert _numbers(three.came(1)) == [9]


def test_a_frame_leaves_as_soon_as_it_is_due() -> None:
    """Whatever the switch tells of its own lateness: a look at the clock later it is gone."""
    with Wires(_topology("1gbit delay 2s")) as wires:
        wires.send(0, 1, 0)
        wires.pass_on(lambda: wires.t.state[columns.READS] == 1)
        wires.t.heap[0, columns.DUE_NS] = loop.now_ns(wires.t)
        for _ in range(2):  # to the queue towards its host, and out of that
            loop._deliver(wires.t)
        assert _numbers(wires.came(1)) == [0]


def test_what_is_told_of_lateness_is_how_late_frames_left() -> None:
    with Wires(_topology("1gbit delay 2s")) as wires:
        for number, late in enumerate([1000] * 97 + [5 * MS] * 3):
            wires.send(0, 1, number)
            wires.pass_on(lambda read=number + 1: wires.t.state[columns.READS] == read)
            slot = loop.pop(wires.t) >> 1  # and from here on by hand, without the two seconds
            loop._send(wires.t, slot, 10**15, 10**15 + late)
        told_late = counters(wires.t)["late"]
    assert told_late["worst"] == pytest.approx(5e-3)
    assert 1e-6 <= told_late["p50"] < 1.2e-6
    assert told_late["p99"] == pytest.approx(5e-3)


def test_there_is_room_for_all_that_a_link_may_hold() -> None:
    """At the rate of every host, both ways: what is delayed, what a stall has held back, and full queues."""
    text = "1gbit delay 10ms jitter 2ms distribution normal stall 100ms every 1s limit 1mb"
    t = create_tables(_topology(text), [-1] * HOSTS, 0)
    held = 125e6 * (10e-3 + 4 * 2e-3 + 100e-3) + 1024**2
    assert len(t.slots) == len(t.frames) == len(t.heap)
    assert len(t.slots) >= HOSTS * 2 * held / 1514


def test_without_room_frames_wait_where_they_are(three: Wires) -> None:
    three.t.state[columns.SPARES] = 0
    three.send(0, 1, 0)
    loop.run(three.t, time.monotonic_ns() + 20 * MS)
    assert three.came(1) == []
    assert three.t.state[columns.POLLS] < 1000, "it looks for what it cannot take"
    three.t.state[columns.SPARES] = len(three.t.slots)
    three.pass_on(lambda: three.t.state[columns.READS] >= 1 and three.is_idle())
    assert _numbers(three.came(1)) == [0]


def test_what_was_compiled_from_other_sources_is_not_taken(tmp_path: Path) -> None:
    columns_then, loop_then = tmp_path / "columns.py", tmp_path / "loop.py"
    columns_then.write_text("DUE_NS = 0")
    loop_then.write_text("pass")
    before = folder([columns_then, loop_then])
    assert before is not None
    assert folder([columns_then, loop_then]) == before
    columns_then.write_text("DUE_NS = 1")
    assert folder([columns_then, loop_then]) != before


def test_more_frames_than_were_decided_ahead_get_their_decisions() -> None:
    """The loop stops for more, and no decision is used twice."""
    network = Compiled(_topology("1gbit loss 50%"), 2)
    fate = FrameFates(parse_link("1gbit loss 50%").impairment, 1, 0).next(12_000).fate
    numbers = []
    for number in range(12_000):
        network._come(number, Given(number * 20_000, 0, 1, 100))
        if network.t.state[columns.LOW]:
            network.decided.fill()
            network.t.state[columns.LOW] = 0
        network.until(number * 20_000 + 10_000)
        numbers += [one.number for one in network.taken]
        network.taken.clear()
    assert numbers == np.flatnonzero(~fate & LOST).tolist()


def test_what_stays_the_same_is_not_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(3)]
    ours = iter(pairs)
    monkeypatch.setattr(serve, "open_tap", lambda interface, name: next(ours)[0].fileno())
    monkeypatch.setattr(serve, "open_counters", lambda name: -1)
    topology = Topology(parse_link("100mbit delay 1ms"), seed=7)
    served = serve.SwitchServer(Setup(("a", "b", "c"), "eth0", State(topology, background=("1mbit",))))
    decided, background = served._decisions, served._background
    served.change(State(Topology(parse_link("100mbit delay 1ms"), seed=7), gone=(1,), background=("1mbit",)))
    assert served._decisions is decided
    assert served._background is background
    assert served.tables.lines[:3, columns.GONE].tolist() == [0, 1, 0]
    served.change(State(topology.with_links({1: parse_link("10mbit")}), background=("1mbit",)))
    assert served._decisions is not decided
    assert served._background is background
    assert served.tables.lines[:3, columns.GONE].tolist() == [0, 0, 0]
    for pair in pairs:
        for end in pair:
            end.close()
