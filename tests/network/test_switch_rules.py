"""The rules of the switch's loop, each by an example.

Times are made up, but for the last tests, where sockets stand in for the hosts' devices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from penstock._base.compiled import folder
from penstock.network.frame_fates import CORRUPT, DUPLICATE, LOST, REORDER, FrameFates
from penstock.network.parse import parse_link
from penstock.network.switch import columns, loop, serve
from penstock.network.switch.client import Setup
from penstock.network.switch.filling import DecisionBuffer, counters, create_tables
from penstock.network.topology import State, Topology

HOSTS = 3
MS = 1_000_000


@dataclass(frozen=True)
class Given:
    """A frame that a host sends."""

    at: int
    source: int
    target: int
    size: int


@dataclass(frozen=True, order=True)
class Taken:
    """A frame that a host gets: which of those given, when, and its wrong bits."""

    at: int
    number: int
    target: int
    wrong: tuple[int, ...] = ()


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


RULES: dict[str, tuple[str, dict[int, str], list[tuple[float, int, int, int]], list[tuple[int, float]]]] = {
    "a link's rate up, and down": (
        "up 100mbit down 10mbit", {}, [(0, 0, 1, 1000), (0, 0, 1, 1000), (0, 2, 1, 1000)],
        [(0, 0.8), (2, 1.6), (1, 2.4)],
    ),
    "a delay counts once, whatever else two links have": (
        "1gbit delay 1ms", {1: "1gbit delay 10ms", 2: "1gbit delay 20ms"},
        [(100.0 * k, *ends, 125) for k, ends in enumerate([(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (0, 3), (3, 0)])],
        [(0, 10.001), (1, 110.001), (2, 220.001), (3, 320.001), (4, 430.001), (5, 501.001), (6, 601.001)],
    ),
    "what a stall has held leaves at the rate": (  # the first one from 7 ms to 9
        "1gbit delay 1ms stall 2ms every 7ms", {},
        [(5, 0, 1, 1000), (6.5, 0, 1, 1000), (6.6, 0, 1, 1000), (8.5, 0, 1, 1000), (9.5, 2, 1, 1000)],
        [(0, 6.008), (1, 9.008), (2, 9.016), (3, 9.508), (4, 10.508)],
    ),
    "a stall towards a host holds its whole queue": (
        "up 1gbit down 1gbit stall 2ms every 7ms", {},
        [(5, 0, 1, 1000), (6.996, 0, 1, 1000), (7.1, 2, 1, 1000), (7.2, 0, 2, 1000)],
        [(0, 5.008), (1, 9.0), (3, 9.0), (2, 9.008)],
    ),
    "what comes behind what a stall has held follows at the rate": (
        "up 100mbit delay 1ms stall 2ms every 7ms down 1gbit", {}, [(6.5, 0, 1, 1000), (6.6, 0, 1, 1000)],
        [(0, 9.008), (1, 9.088)],
    ),
    "bytes that a stall holds wait no longer in the queue": (
        "up 1gbit down 1gbit stall 2ms every 7ms limit 3kb", {}, [(7.1 + k / 10, 0, 1, 1000) for k in range(3)],
        [(0, 9.0), (1, 9.008), (2, 9.016)],
    ),
    "a queue holds its limit": (
        f"up 1000gbit down 1gbit limit {3 * 1514}", {},
        [*[(0, host, 1, 1514) for host in (0, 2, 3, 0)], (2 * 1514 * 8e-6, 2, 1, 1514)],
        [(k, 1514 * 8e-6 * place) for place, k in enumerate((0, 1, 2, 4), 1)],
    ),
}  # fmt: skip
"""A link, hosts' own, frames (ms, from, to, bytes), and which come when (ms). A byte takes 8 ns at 1gbit."""


def _played(network: Compiled, frames: Sequence[tuple[float, int, int, int]]) -> list[tuple[int, float]]:
    taken = network.play([Given(round(at * MS), *rest) for at, *rest in frames])
    slots = network.t.slots  # nothing of the memory is lost, and nothing of it is in two hands
    assert sorted(slots[:, columns.SPARE]) == list(range(network.t.state[columns.SPARES])) == list(range(len(slots)))
    return [(one.number, one.at / MS) for one in taken]


@pytest.mark.parametrize("rule", RULES)
def test_frames_come_by_the_rules(rule: str) -> None:
    text, own, frames, expected = RULES[rule]
    found = _played(Compiled(_topology(text, own), 4), frames)
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert [at for _, at in found] == pytest.approx([at for _, at in expected], abs=1e-4)


def test_neighbors_are_in_the_queue_and_nobody_gets_what_is_sent_to_a_host_that_is_gone() -> None:
    network = Compiled(_topology("up 1gbit down 10mbit limit 3kb"))
    network.near(
        1, [(round(at * MS), size) for at, size in [(0, 1000), (0.1, 1000), (0.2, 1000), (0.3, 1000), (1.5, 64)]]
    )
    assert _played(network, [(1, 0, 1, 1000), (1.9, 0, 1, 1000)]) == [
        (0, pytest.approx(3.2)),
        (1, pytest.approx(4.0512)),
    ]
    told = counters(network.t)["links"][1]["down"]
    assert (told["frames"], told["background_bytes"], told["background_queue_full"]) == (2, 3064, 1)
    network = Compiled(_topology("1gbit delay 1ms"))
    network.gone(1)
    assert [number for number, _ in _played(network, [(0, 0, 1, 99), (0, 1, 0, 99), (0, 0, 2, 99)])] == [2]
    assert [one["up"]["host_gone"] for one in counters(network.t)["links"]] == [1, 1, 0]


def _through(frames: Sequence[Taken], text: str, stream: int, told: Counter[str]) -> list[Taken]:
    """Frames after the fates that a link draws for them, counted in `told`."""
    link, last, left = parse_link(f"1gbit {text}"), 0, []
    drawn = FrameFates(link.impairment, 1, stream).next(len(frames))
    for frame, fate, delay, bit in zip(frames, drawn.fate, drawn.delay_ns, drawn.bit, strict=True):
        for name, kind in (("corrupted", CORRUPT), ("duplicated", DUPLICATE), ("reordered", REORDER), ("lost", LOST)):
            told[name] += bool(fate & kind and (kind == LOST or not fate & LOST))
        if fate & LOST:
            continue
        wrong = {14 * 8 + int(bit) % (8 * 86)} if fate & CORRUPT else set()
        leaves = frame.at
        if not fate & REORDER:
            leaves += int(delay)
            last = leaves = leaves if link.impairment.overtaking else max(leaves, last)
        left += [replace(frame, at=leaves, wrong=(*sorted({*frame.wrong} ^ wrong),))] * (2 if fate & DUPLICATE else 1)
    return sorted(left, key=lambda frame: frame.at)


BAD = "delay 5ms jitter 2ms distribution pareto loss 10% duplicate 10% corrupt 20% reorder 20%"
FREE, WAYS = f"{BAD} overtaking", ("up", "down", "both", "both overtaking")


@pytest.mark.parametrize("between_ns", [MS, 1000])
@pytest.mark.parametrize(("up", "down"), [(BAD, ""), ("", BAD), (BAD, BAD), (FREE, FREE)], ids=WAYS)
def test_each_frame_has_the_fates_that_were_drawn_for_it(up: str, down: str, between_ns: int) -> None:
    """In order, unless it is reordered or the link lets frames overtake each other."""
    network = Compiled(_topology(f"up 1gbit {up} down 1gbit limit 1mb {down}"))
    told_up, told_down = Counter[str](), Counter[str]()
    frames, free = [Taken(between_ns * number, number, 1) for number in range(500)], 0
    if up:
        frames = _through(frames, up, 0, told_up)
    for place, frame in enumerate(frames):
        free = max(free, frame.at) + 800
        frames[place] = replace(frame, at=free)
    if down:
        frames = _through(frames, down, HOSTS + 1, told_down)
    assert network.play([Given(between_ns * number, 0, 1, 100) for number in range(500)]) == frames
    links = counters(network.t)["links"]
    for counted, expected in ((links[0]["up"], told_up), (links[1]["down"], told_down)):
        assert expected.items() <= counted.items()


def test_other_links_from_now_on_leave_frames_under_way_as_they_are() -> None:
    network = Compiled(_topology("1gbit delay 10ms"))
    network._come(0, Given(0, 0, 1, 60))
    later = _topology("1gbit delay 1ms loss 50%")
    DecisionBuffer(network.t, later, epoch=1)
    fate = FrameFates(later.link.impairment, 1, 0 + 2 * HOSTS).next(100).fate
    for number in range(1, 101):
        network._come(number, Given(number * 1000, 0, 1, 60))
    network.until(None)
    assert network.taken[0] == Taken(10 * MS + 60 * 8, 0, 1)
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
        loop.run(self.t, 0)  # compiles it, which may take longer than any frame

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


def _numbers(frames: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(frame[14:18]) for frame in frames]


@pytest.fixture
def three() -> Iterator[Wires]:
    with Wires(_topology("1gbit delay 2ms")) as wires:
        yield wires


def test_a_frame_to_all_gets_to_all_others_and_one_of_nothing_but_a_header_to_nobody(three: Wires) -> None:
    three._hosts[0].send(bytes(5) + b"\x02" + bytes(8))
    three.send(1, 255, 0)
    three.pass_on(lambda: three.t.state[columns.READS] >= 1 and three.is_idle())
    assert [_numbers(three.came(host)) for host in range(HOSTS)] == [[0], [], [0]]
    assert three.t.state[columns.SPARES] == len(three.t.slots)


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
