"""The loop's arrays: created for a network, and kept filled with decisions while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.network.frame_fates import FrameFates
from penstock.network.link import Impairment
from penstock.network.switch import columns
from penstock.network.switch.columns import Tables
from penstock.network.topology import Topology

BLOCK = 8192
"""Capacity for decisions; 16 frames to each of 200 hosts take 3200."""
AT_ONCE = 1024
"""The number of decisions drawn together. This takes 0.1 to 0.3 ms, during which no frame is forwarded."""
MAX_BYTES = 512 * 1024**2
"""The most memory for all frames in flight."""


def in_flight_bytes(topology: Topology, hosts: int) -> float:
    """Return the most bytes in flight if every host sends at its rate: in queues, delayed, or held back by a stall."""
    total = 0.0
    for host in range(hosts):
        for link in (topology.up(host), topology.down(host)):
            delay = link.impairment.longest_seconds + link.impairment.stall_seconds
            total += link.limit_bytes + link.bytes_per_second * delay
    return total


def create_tables(topology: Topology, descriptors: Sequence[int], start_ns: int) -> Tables:
    """Create the arrays for hosts with these TAP devices."""
    hosts = len(descriptors)
    stride = -(-(topology.mtu + 64) // 64) * 64
    # Twice as many, because acknowledgements also take a slot each.
    slots = int(min(2 * in_flight_bytes(topology, hosts), MAX_BYTES) / stride) + 4096
    polls = np.zeros((hosts, 2), dtype=np.int32)
    polls[:, 0], polls[:, 1] = descriptors, 1  # POLLIN
    tables = Tables(
        polls=polls,
        lines=np.zeros((2 * hosts, columns.LINES), dtype=np.int64),
        affects=np.zeros((hosts, hosts, 2), dtype=np.uint8),
        draws=np.zeros((2 * hosts, BLOCK, 3), dtype=np.int64),
        near=np.zeros((hosts, BLOCK, 2), dtype=np.int64),
        frames=np.zeros((slots, stride), dtype=np.uint8),
        slots=np.zeros((slots, 4), dtype=np.int64),
        heap=np.zeros((slots, 3), dtype=np.int64),
        state=np.zeros(columns.STATE, dtype=np.int64),
    )
    tables.lines[:hosts, columns.FREE_NS] = -(2**62)  # no frame has arrived yet
    tables.slots[:, columns.SPARE] = np.arange(slots)
    tables.state[columns.SPARES] = slots
    # Enough for all frames that are read from a host at once, if each were a broadcast.
    tables.state[columns.ENOUGH] = columns.READS_AT_ONCE * hosts
    tables.state[columns.START_NS] = start_ns
    return tables


class DecisionBuffer:
    """Keeps each direction's decisions ahead of its frames."""

    def __init__(self, t: Tables, topology: Topology, epoch: int = 0, now_ns: int | None = None) -> None:
        """Put a network's rules into the arrays; frames in flight are not affected.

        Args:
            epoch: how many times the network has changed before; each change draws anew.
            now_ns: the current time, at which the period of new stalls begins; None for the start of the network.
        """
        self._t = t
        hosts = t.affects.shape[0]
        self._fates: list[FrameFates | None] = []
        for direction in range(2 * hosts):
            host, is_up = direction % hosts, direction < hosts
            link = topology.up(host) if is_up else topology.down(host)
            impairment = _direction_impairment(topology, host, hosts, is_up=is_up)
            line = t.lines[direction]
            line[columns.BYTE_PS] = max(1, round(1e12 / link.bytes_per_second))
            line[columns.LIMIT] = link.limit_bytes
            line[columns.OVERTAKES] = impairment.overtaking
            stall_ns = [round(impairment.stall_seconds * 1e9), round(impairment.stall_every_seconds * 1e9)]
            if line[[columns.STALL_NS, columns.EVERY_NS]].tolist() != stall_ns:
                line[[columns.STALL_NS, columns.EVERY_NS]] = stall_ns
                line[columns.SINCE_NS] = t.state[columns.START_NS] if now_ns is None else now_ns
            line[columns.FILLED] = line[columns.DRAWN]
            stream = direction + 2 * hosts * epoch
            self._fates.append(FrameFates(impairment, topology.seed, stream) if impairment else None)
        for source in range(hosts):
            for target in range(hosts):
                t.affects[source, target] = [bool(part) for part in topology.path_impairments(source, target)]
        self.fill()

    def fill(self) -> None:
        """Fill each direction that runs short or, if none does, the one that has the least left."""
        lines, enough = self._t.lines, int(self._t.state[columns.ENOUGH])
        remaining = lines[:, columns.FILLED] - lines[:, columns.DRAWN]
        remaining[[fates is None for fates in self._fates]] = BLOCK
        short = np.flatnonzero(remaining <= enough).tolist()
        for direction in short or [int(np.argmin(remaining))]:
            fates, available = self._fates[direction], int(remaining[direction])
            if fates is not None and BLOCK - available >= AT_ONCE:
                self._fill(direction, fates, max(AT_ONCE, enough + AT_ONCE - available))

    def _fill(self, direction: int, fates: FrameFates, count: int) -> None:
        line, ring = self._t.lines[direction], self._t.draws[direction]
        positions = np.arange(line[columns.FILLED], line[columns.FILLED] + count) % BLOCK
        drawn = fates.next(count)
        ring[positions, columns.FATE], ring[positions, columns.DELAY_NS], ring[positions, columns.BIT] = drawn
        line[columns.FILLED] += count


def _direction_impairment(topology: Topology, host: int, hosts: int, *, is_up: bool) -> Impairment:
    """Return what affects frames in a direction; nothing if no frame is affected."""
    for peer in range(hosts):
        if peer != host:
            rules = topology.path_impairments(host, peer)[0] if is_up else topology.path_impairments(peer, host)[1]
            if rules:
                return rules
    return Impairment()


STALL = ("since_ns", "length_ns", "every_ns")
"""A stalling link's fields: since when, how long, and how often it stalls; the first stall follows a whole period."""


def stalls(t: Tables) -> set[tuple[int, ...]]:
    """Return the stalls of all directions, with fields in the order of `STALL`."""
    rows = t.lines[:, [columns.SINCE_NS, columns.STALL_NS, columns.EVERY_NS]].tolist()
    return {tuple(row) for row in rows if row[1]}


def counters(t: Tables) -> dict[str, Any]:
    """Return the counters so far, as plain values.

    seconds: since the start
    frames: sent by hosts
    failed_writes: frames that a host's device refused
    no_room: how often no frame could be read because all memory was in use
    busy_seconds: time not spent asleep
    late: how much later than requested frames left, in seconds
    stalls: the links' stalls, which `penstock.network.fabric.samples` reads
    links: by host and direction, see `columns.COUNTED`
    """
    hosts = t.affects.shape[0]
    state = t.state
    return {
        "seconds": (time.monotonic_ns() - int(state[columns.START_NS])) / 1e9,
        "frames": int(state[columns.READS]),
        "failed_writes": int(state[columns.FAILED]),
        "no_room": int(state[columns.NO_SLOT]),
        "busy_seconds": state[columns.BUSY_NS] / 1e9,
        "late": lateness(state),
        "stalls": [dict(zip(STALL, stall, strict=True)) | {"until_ns": None} for stall in sorted(stalls(t))],
        "links": [
            {
                direction: {name: int(t.lines[row, column]) for name, column in columns.COUNTED.items()}
                for direction, row in (("up", host), ("down", hosts + host))
            }
            for host in range(hosts)
        ],
    }


def lateness(state: Any) -> dict[str, float | None]:
    """Return how much later than requested frames left, in seconds: upper bounds of quantiles, and the worst."""
    counts = state[columns.LATE :]
    total = int(counts.sum())
    figures: dict[str, float | None] = {"p50": None, "p99": None, "worst": None}
    if total:
        reached = np.cumsum(counts) / total
        figures["worst"] = float(state[columns.WORST_NS] / 1e9)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            upper = 2.0 ** ((int(np.searchsorted(reached, share)) + 1) / columns.PER_OCTAVE) / 1e9
            figures[name] = min(upper, float(state[columns.WORST_NS]) / 1e9)
    return figures
