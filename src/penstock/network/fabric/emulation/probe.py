"""Measure the links between neighbors before the trials: the round trip of a small message, and a steady stream.

Latency is half of the shortest of several round trips of a small message, because any other activity only adds to it.
The time that the message's bytes take at each end's rate is subtracted, and so is the shapers' delay, if it is known;
the latter is then added back to its own direction. Receives are posted ahead, as in collectives. Otherwise, the
receiver's signal that it is ready would be included.

Bandwidth is measured with a stream that is lengthened until it is steady. Single messages would measure TCP slow start:
TCP sends little at first and more with each round trip, so the larger of two messages seems to take hardly any longer.
Only the receiver reads its clock, once per chunk, and only the later half of a stream counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from penstock._base.errors import FabricError
from penstock.network.fabric.emulation.collectives import Message, Wire
from penstock.network.fabric.emulation.rendezvous import Members, gather
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.topology import Topology, recorded_topology

PING_BYTES = 4
PING_PACKETS = (118, 84)
"""Bytes on the wire of the small message's two packets, headers included: gloo's own header, and the payload.

They pass the sender's and the receiver's end of the link in turn. Measured at 1 Mbit/s: 202 bytes if one end is that
slow, 320 if both are.
"""
MIN_TRIPS, MAX_TRIPS = 4, 30
TRIPS_SECONDS = 0.3
"""After the minimum, as many more trips follow as fit into this time."""

CHUNKS = 32
"""The number of chunks in a stream of any size, each with one reading of the clock.

With more chunks, gloo's headers would take up more of the link.
"""
FIRST_BYTES = 32 * 1024
MAX_BYTES = 256 * 1024 * 1024
"""The largest stream: a second at 2 Gbit/s. Anything faster is limited by processors, and steady at once."""
HALF_SECONDS, HALF_TRIPS = 0.4, 4
"""The least duration of a stream's later half, in seconds and in round trips: TCP probes for bandwidth in cycles."""
STEADY = 0.03
"""The largest difference between the last two quarters of a steady stream, as a fraction."""
UNSTEADY_STREAMS = 3
"""The number of full-length streams after which the last one is accepted: a lossy link is never steady."""
BUDGET_SECONDS = 12.0
"""After this time, no further stream begins in the same direction."""


class Pace(NamedTuple):
    """What the later half of a stream shows: its rate, infinite if the clock cannot resolve it, how long it took, and
    whether its two halves took about equally long."""

    bytes_per_second: float
    seconds: float
    steady: bool


class LinkMeasurement(NamedTuple):
    """The measurement of one direction of a link.

    Attributes:
        latency_seconds: one way, without the time that the bytes take at the link's rate.
        bytes_per_second: of message bytes, so without headers; None if the clock cannot resolve it.
    """

    latency_seconds: float
    bytes_per_second: float | None


class Ends(NamedTuple):
    """What shapes one direction of a link, where known.

    Attributes:
        up, down: bytes per second at the sender's end and at the receiver's, headers included.
        delay_seconds: the delay of every frame.
    """

    up: float
    down: float
    delay_seconds: float = 0.0

    @property
    def ping_seconds(self) -> float:
        """How long the small message takes to pass both ends, from its first byte to its last, without the delay."""
        sent = arrived = 0.0
        for size in PING_PACKETS:
            sent += size / self.up
            arrived = max(sent, arrived) + size / self.down
        return arrived


def neighbors(hosts: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs to measure: neighbors on a ring."""
    return tuple((rank, (rank + 1) % hosts) for rank in range(hosts if hosts > 2 else 1))


def measure(
    pair: tuple[int, int], wire: Wire, ends: Mapping[tuple[int, int], Ends] | None = None
) -> dict[tuple[int, int], LinkMeasurement]:
    """Measure both directions between a pair of ranks, on both ranks of the pair; other ranks return nothing. `ends` is
    what shapes each direction; if None, both ends are assumed to be as fast as the stream."""
    rank = dist.get_rank()
    if rank not in pair:
        return {}
    is_first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    fastest = min(_trips(is_first, peer, wire, MIN_TRIPS))
    count = _share_value(min(TRIPS_SECONDS / max(fastest, 1e-6), MAX_TRIPS), peer, decides=is_first)
    trip = _share_value(min([fastest, *_trips(is_first, peer, wire, int(count))]), peer, decides=is_first)
    rates = {path: _rate(rank == path[0], peer, wire, trip) for path in (pair, pair[::-1])}
    return split_round_trip(trip, rates, ends or {path: Ends(rate, rate) for path, rate in rates.items()})


def split_round_trip(
    trip_seconds: float, rates: Mapping[tuple[int, int], float], ends: Mapping[tuple[int, int], Ends]
) -> dict[tuple[int, int], LinkMeasurement]:
    """Split a round trip into two latencies, halving what remains without both messages' bytes and delays."""
    remaining = trip_seconds - sum(end.ping_seconds + end.delay_seconds for end in ends.values())
    measurements = {}
    for path, rate in rates.items():
        latency = ends[path].delay_seconds + remaining / 2
        bandwidth = None if rate == float("inf") else rate
        measurements[path] = LinkMeasurement(max(latency, 0.0), bandwidth)
    return measurements


def compute_pace(stamps: Sequence[float], chunk_bytes: int) -> Pace:
    """Compute the pace of a stream from the arrival time of each chunk in seconds.

    Each chunk of the third quarter is compared with its counterpart in the fourth, and the median counts, so an
    occasional late wake-up of the receiver changes nothing.
    """
    later = np.asarray(stamps)[len(stamps) // 2 - 1 :]
    half = len(later) // 2
    gap = float(np.median(later[half:] - later[:-half]))
    took = float(later[-1] - later[0])
    quarters = float(later[half] - later[0]), float(later[-1] - later[len(later) - 1 - half])
    steady = abs(quarters[1] - quarters[0]) <= STEADY * took / 2
    return Pace(half * chunk_bytes / gap if gap > 0 else float("inf"), took, steady)


def _trips(is_first: bool, peer: int, wire: Wire, count: int) -> list[float]:
    """Return the seconds of some round trips, as seen by the rank that starts them."""
    buffer = torch.zeros(PING_BYTES, dtype=torch.uint8)
    sends = [Message(buffer, peer)]
    ready, *receives = [[Message(torch.empty_like(buffer), peer)] for _ in range(count + 1)]
    for message in (ready, *receives):
        wire.expect(message)
    wire.exchange(sends, ready)  # from here on, the other rank's receives are known to be posted
    seconds = []
    for message in receives:
        start = time.monotonic()
        if is_first:
            wire.exchange(sends, [])
        wire.exchange([], message)
        if not is_first:
            wire.exchange(sends, [])
        seconds.append(time.monotonic() - start)
    return seconds


def _rate(sends: bool, peer: int, wire: Wire, trip_seconds: float) -> float:
    """Return the bytes per second of a steady stream, on both ranks. The receiver decides how to continue: with a
    longer stream, until its later half takes long enough and is steady."""
    began, long_streams, chunk = time.monotonic(), 0, FIRST_BYTES // CHUNKS
    least_seconds = max(HALF_SECONDS, HALF_TRIPS * trip_seconds)
    while True:
        stamps, pace = _stream(sends, peer, wire, chunk), Pace(0.0, 0.0, False)
        if not sends:
            pace = compute_pace(stamps, chunk)
            is_long = pace.seconds >= least_seconds or chunk >= MAX_BYTES // CHUNKS
            long_streams += is_long
            factor = min(max(1.2 * least_seconds / pace.seconds, 1.0), 8.0) if pace.seconds > 0 else 8.0
            chunk = min(int(chunk * factor), MAX_BYTES // CHUNKS)
            is_late = time.monotonic() - began > BUDGET_SECONDS
            if is_late or (is_long and (pace.steady or long_streams == UNSTEADY_STREAMS)):
                chunk = 0
        chunk = int(_share_value(chunk, peer, decides=not sends))
        rate = _share_value(pace.bytes_per_second, peer, decides=not sends)
        if not chunk:
            return rate


def _stream(sends: bool, peer: int, wire: Wire, chunk_bytes: int) -> list[float]:
    """Return when each chunk arrived, on the receiver; empty on the sender."""
    buffer, go = torch.zeros(chunk_bytes, dtype=torch.uint8), torch.zeros(1)
    if sends:
        wire.exchange([], [Message(go, peer)])
        for _ in range(CHUNKS):
            wire.exchange([Message(buffer, peer)], [])
        return []
    receives = [[Message(buffer, peer)] for _ in range(CHUNKS)]
    for message in receives:
        wire.expect(message)
    wire.exchange([Message(go, peer)], [])
    stamps = []
    for message in receives:
        wire.exchange([], message)
        stamps.append(time.monotonic())
    return stamps


def _share_value(value: float, peer: int, *, decides: bool) -> float:
    """Return the deciding rank's value, on both ranks."""
    message = torch.tensor([value], dtype=torch.float64)
    if decides:
        dist.send(message, peer)
    else:
        dist.recv(message, peer)
    return float(message[0])


# -- all links of a run, and what shapes them --------------------------------------------------------------------------

TOLERANCE = 0.01
"""How far a measured rate may exceed the shaper's, as a fraction: a token bucket lets some bytes through at once."""
TRIES = 3


def measure_links(spec: Spec, wire: Wire, members: Members) -> list[dict[str, Any]]:
    """Measure both directions between all neighbors, pair by pair, and return a dict for each; none if links are not to
    be measured, or the backend is not gloo. Raise FabricError: a rate above the shaper's was measured repeatedly."""
    if not spec.measures_links or spec.backend != "gloo":
        return []
    links, topology = [], recorded_topology(spec.network)
    for pair in neighbors(spec.hosts):
        ends = shaped_ends(topology, pair)
        for _ in range(TRIES):
            results = measure(pair, wire, ends)
            faults = [fault for path, m in results.items() if ends and (fault := above_shaper(path, m, ends[path]))]
            if not faults:
                break
        else:
            raise FabricError(faults[0])
        links += [{"from": source, "to": target, **m._asdict()} for (source, target), m in results.items()]
        dist.barrier(group=members.control)
    by_ends = {(entry["from"], entry["to"]): entry for host_links in gather(links, members) for entry in host_links}
    return list(by_ends.values())


def above_shaper(path: tuple[int, int], link: LinkMeasurement, ends: Ends) -> str | None:
    """Describe a measured rate that the shapers make impossible; None if it is possible."""
    rate = min(ends.up, ends.down)
    if (link.bytes_per_second or float("inf")) <= rate * (1 + TOLERANCE):
        return None
    rate_text = "no finite rate" if link.bytes_per_second is None else f"{link.bytes_per_second * 8e-6:,.1f} Mbit/s"
    return (
        f"Penstock measured the link from host {path[0]} to host {path[1]} {TRIES} times, at last as {rate_text}, "
        f"although its shaper passes only {rate * 8e-6:,.1f} Mbit/s. A receiver that wakes late reads at once what has "
        "queued up: run again on a machine with less other work. If it had none, the shaper does not work"
    )


def shaped_ends(topology: Topology | None, pair: tuple[int, int]) -> dict[tuple[int, int], Ends] | None:
    """Return what shapes each direction between two hosts; None if unknown."""
    if topology is None:
        return None
    paths = pair, pair[::-1]
    rates = {(a, b): (topology.up(a).bytes_per_second, topology.down(b).bytes_per_second) for a, b in paths}
    return {path: Ends(*rates[path], topology.min_delay(*path)) for path in paths}
