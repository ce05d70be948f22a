"""The switch's rules once more, in plain Python and without a clock: what the compiled loop is held against.

Written from the opening comment of `network/switch/loop.py`. Stalls are a list of intervals, a queue adds up what it
holds, events lie in a sorted list: slow, and plain to see. Times are nanoseconds, and a byte takes a whole number of
them.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.network.frame_fates import CORRUPT, DUPLICATE, LOST, REORDER, FrameFates
from penstock.network.link import Impairment
from penstock.network.topology import Topology

MANY = 2000
"""Decisions that are drawn for each direction."""
HEADER = 14


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


@dataclass
class Line:
    """One direction of a host's link."""

    ns_per_byte: int
    limit: int
    met: Impairment
    draws: list[tuple[int, int, int]] = field(default_factory=list)
    met_frames: int = 0
    last: int = 0
    held: int = 0
    free: int = 0
    there: int = -(10**18)
    told: Counter[str] = field(default_factory=Counter)

    def stalls(self, until: int) -> list[tuple[int, int]]:
        length, every = (round(x * 1e9) for x in (self.met.stall_seconds, self.met.stall_every_seconds))
        if not length:
            return []
        return [(turn * every, turn * every + length) for turn in range(1, until // every + 2)]

    def after_stall(self, at: int) -> int:
        return next((end for begin, end in self.stalls(at) if begin <= at < end), at)

    def open_between(self, begin: int, end: int) -> int:
        shut = [max(0, min(end, closes) - max(begin, opens)) for opens, closes in self.stalls(end)]
        return end - begin - sum(shut)


class Network:
    """Hosts, their links, and the frames under way."""

    def __init__(self, topology: Topology, hosts: int) -> None:
        self.topology = topology
        self.hosts = hosts
        self.gone: set[int] = set()
        self.near: list[list[tuple[int, int]]] = [[] for _ in range(hosts)]
        self.taken: list[Taken] = []
        self.events: list[tuple[int, int, str, int, Given, tuple[int, ...]]] = []
        self.turn = 0
        self.ups = [self._line(host, is_up=True) for host in range(hosts)]
        self.downs = [self._line(host, is_up=False) for host in range(hosts)]

    def _line(self, host: int, *, is_up: bool) -> Line:
        link = self.topology.up(host) if is_up else self.topology.down(host)
        others = [other for other in range(self.hosts) if other != host]
        mets = [
            self.topology.path_impairments(host, o)[0] if is_up else self.topology.path_impairments(o, host)[1]
            for o in others
        ]
        met = next((met for met in mets if met), Impairment())
        line = Line(round(1e9 / link.bytes_per_second), link.limit_bytes, met)
        if met:
            drawn = FrameFates(met, self.topology.seed, host if is_up else self.hosts + host).next(MANY)
            line.draws = [*zip(drawn.fate.tolist(), drawn.delay_ns.tolist(), drawn.bit.tolist(), strict=True)]
        return line

    def play(self, frames: Sequence[Given]) -> list[Taken]:
        """All frames, in order of time, and everything that follows from them."""
        for number, frame in enumerate(frames):
            self.until(frame.at)
            self._come(number, frame)
        self.until(None)
        return self.taken

    def until(self, end: int | None) -> None:
        """All that is due by then."""
        while self.events and (end is None or self.events[0][0] <= end):
            at, _, where, number, frame, wrong = self.events.pop(0)
            if where == "port":
                self._port(at, number, frame, wrong)
            elif frame.target in self.gone:
                self.downs[frame.target].told["host_gone"] += 1
            else:
                self.taken.append(Taken(at, number, frame.target, wrong))

    def _soon(self, at: int, where: str, number: int, frame: Given, wrong: tuple[int, ...]) -> None:
        self.turn += 1
        bisect.insort(self.events, (at, self.turn, where, number, frame, wrong))

    def _come(self, number: int, frame: Given) -> None:
        line = self.ups[frame.source]
        line.told["frames"] += 1
        line.told["bytes"] += frame.size
        line.there = max(frame.at, line.there + frame.size * line.ns_per_byte)
        if {frame.source, frame.target} & self.gone:
            line.told["host_gone"] += 1
        elif self.topology.path_impairments(frame.source, frame.target)[0]:
            self._meet(line, line.there, "port", number, frame, ())
        else:
            self._soon(line.there, "port", number, frame, ())

    def _meet(self, line: Line, at: int, where: str, number: int, frame: Given, wrong: tuple[int, ...]) -> None:
        fate, delay, bit = line.draws[line.met_frames]
        line.met_frames += 1
        if fate & LOST:
            line.told["lost"] += 1
            return
        if fate & CORRUPT:
            line.told["corrupted"] += 1
            bit = HEADER * 8 + bit % (8 * (frame.size - HEADER))
            wrong = tuple(sorted({*wrong} ^ {bit}))
        jumps = bool(fate & REORDER)
        line.told["reordered"] += jumps
        leaves = at if jumps else at + delay if line.met.overtaking else max(at + delay, line.last)
        if where == "port":  # the other way, its queue has stalled
            through = line.after_stall(max(leaves, line.held))
            if through > leaves:
                line.held = through + frame.size * line.ns_per_byte
            leaves = through
        if not jumps:
            line.last = leaves
        line.told["duplicated"] += bool(fate & DUPLICATE)
        for _ in range(2 if fate & DUPLICATE else 1):
            self._soon(leaves, where, number, frame, wrong)

    def _port(self, at: int, number: int, frame: Given, wrong: tuple[int, ...]) -> None:
        line = self.downs[frame.target]
        line.told["frames"] += 1
        line.told["bytes"] += frame.size
        near = self.near[frame.target]
        while near and near[0][0] <= at:
            came, size = near.pop(0)
            line.told["background_bytes"] += size * (fits := self._joins(line, came, size))
            line.told["background_queue_full"] += not fits
        if frame.target in self.gone:
            line.told["host_gone"] += 1
        elif not self._joins(line, at, frame.size):
            line.told["queue_full"] += 1
        elif self.topology.path_impairments(frame.source, frame.target)[1]:
            self._meet(line, line.free, "out", number, frame, wrong)
        else:
            self._soon(line.free, "out", number, frame, wrong)

    @staticmethod
    def _joins(line: Line, at: int, size: int) -> bool:
        free = max(line.free, at)
        waiting = line.open_between(at, free) // line.ns_per_byte
        if waiting + size > line.limit:
            return False
        line.free = line.after_stall(free + size * line.ns_per_byte)
        return True
