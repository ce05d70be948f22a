"""What the links between neighbours can do, before the trials: a message's way there and back, and a steady stream.

Latency is half of the shortest of several round trips of a small message: whatever else goes on only adds to it. The
time that its bytes take at each end's rate is taken off, and where the shapers' delays are known, so is their part. A
collective's receives are posted ahead, so they are here; otherwise the receiver's word that it is ready would have
been counted as well.

Bandwidth is that of a stream that grows until it is steady. Single messages would tell how fast TCP starts: it sends
little at first, and more with each round trip, so that of two messages the larger one seems to take almost no longer.
The receiver alone looks at its clock, once a chunk, and only the later half of a stream counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from penstock.fabric.emulation.wires import Message, Wire

PING_BYTES = 4
PING_PACKETS = (118, 84)
"""Bytes on the wire of such a message: gloo's header and the payload go as two packets with headers of their own, and
pass the sender's and the receiver's end of the link one after the other. As measured at 1 Mbit/s: 202 bytes where one
end is as slow, 320 where both are."""
FEWEST_TRIPS, MOST_TRIPS = 4, 30
TRIPS_SECONDS = 0.3
"""After the fewest, so many more as go into this time."""

CHUNKS = 32
"""Of a stream, whatever its size: one look at the clock each. More would spend more of the link on gloo's headers."""
FIRST_BYTES = 32 * 1024
MOST_BYTES = 256 * 1024 * 1024
"""Of a stream; a second of 2 Gbit/s. What is faster is limited by processors, and steady at once."""
HALF_SECONDS, HALF_TRIPS = 0.4, 4
"""The later half of a stream takes as long, and as many round trips: a TCP that looks for more comes round in some."""
STEADY = 0.03
"""By which share the last two quarters of a stream may differ."""
UNSTEADY_STREAMS = 3
"""Of full length, after which the last one has to do: a link that loses frames is never steady."""
BUDGET_SECONDS = 12.0
"""Of one direction, after which no other stream is begun."""


class Pace(NamedTuple):
    """What the later half of a stream has shown.

    Attributes:
        bytes_per_second: infinite where it is faster than the clock tells.
        seconds: that it took.
        steady: its two halves went alike.
    """

    bytes_per_second: float
    seconds: float
    steady: bool


class Measured(NamedTuple):
    """Of one direction of a link.

    Attributes:
        latency_seconds: one way, without the time that the rate takes for the bytes.
        bytes_per_second: of what messages carry, so without headers; None where it is faster than the clock tells.
        missing_seconds: by which the message came sooner than its bytes alone take by what is known of the link: then
            the latency is given as 0, and is not known any better than that.
    """

    latency_seconds: float
    bytes_per_second: float | None
    missing_seconds: float = 0.0


class Ends(NamedTuple):
    """What shapes one direction, where that is known.

    Attributes:
        up, down: bytes a second of the sender's end and of the receiver's, headers counted.
        delay_seconds: of every frame.
    """

    up: float
    down: float
    delay_seconds: float = 0.0

    @property
    def ping_seconds(self) -> float:
        """From the first byte's leaving to the last one's coming through both ends, delay aside."""
        left = came = 0.0
        for size in PING_PACKETS:
            left += size / self.up
            came = max(left, came) + size / self.down
        return came


def neighbours(hosts: int) -> tuple[tuple[int, int], ...]:
    """The pairs that are measured: those of a ring."""
    return tuple((rank, (rank + 1) % hosts) for rank in range(hosts if hosts > 2 else 1))


def measure(
    pair: tuple[int, int], wire: Wire, ends: Mapping[tuple[int, int], Ends] | None = None
) -> dict[tuple[int, int], Measured]:
    """Both directions, on both of the pair, which both call it; nothing on others.

    `ends`: of both directions; None: nobody knows, and both ends of each are taken for as fast as the stream.
    """
    rank = dist.get_rank()
    if rank not in pair:
        return {}
    first, other = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    trip = _shortest_trip(first, other, wire)
    rates = {way: _rate(rank == way[0], other, wire, trip) for way in (pair, pair[::-1])}
    return one_way(trip, rates, ends or {way: Ends(rate, rate) for way, rate in rates.items()})


def one_way(
    trip_seconds: float, rates: Mapping[tuple[int, int], float], ends: Mapping[tuple[int, int], Ends]
) -> dict[tuple[int, int], Measured]:
    """Of a round trip both ways: what is left without the bytes of both messages and both delays is in halves."""
    left = trip_seconds - sum(one.ping_seconds + one.delay_seconds for one in ends.values())
    found = {}
    for way, rate in rates.items():
        latency = ends[way].delay_seconds + left / 2
        known = None if rate == float("inf") else rate
        found[way] = Measured(max(latency, 0.0), known, max(-latency, 0.0))
    return found


def pace(stamps: Sequence[float], chunk_bytes: int) -> Pace:
    """Of a stream, from when each of its chunks was there, in seconds.

    Each chunk of the third quarter is compared with its counterpart in the fourth, and the median counts, so that a
    receiver that is woken late now and then changes nothing.
    """
    later = np.asarray(stamps)[len(stamps) // 2 - 1 :]
    half = len(later) // 2
    gap = float(np.median(later[half:] - later[:-half]))
    took = float(later[-1] - later[0])
    quarters = float(later[half] - later[0]), float(later[-1] - later[len(later) - 1 - half])
    steady = abs(quarters[1] - quarters[0]) <= STEADY * took / 2
    return Pace(half * chunk_bytes / gap if gap > 0 else float("inf"), took, steady)


def next_chunk(chunk_bytes: int, found: Pace, trip_seconds: float) -> int:
    """The chunk of the next stream, which must be long enough for its later half to be steady."""
    wanted = 1.2 * max(HALF_SECONDS, HALF_TRIPS * trip_seconds)
    factor = 8.0 if found.seconds <= 0 else min(max(wanted / found.seconds, 1.0), 8.0)
    return min(int(chunk_bytes * factor), MOST_BYTES // CHUNKS)


def is_long(found: Pace, trip_seconds: float) -> bool:
    """Whether the later half of a stream took as long as it has to."""
    return found.seconds >= max(HALF_SECONDS, HALF_TRIPS * trip_seconds)


def _shortest_trip(first: bool, other: int, wire: Wire) -> float:
    few = min(_trips(first, other, wire, FEWEST_TRIPS))
    more = _agreed(min(TRIPS_SECONDS / max(few, 1e-6), MOST_TRIPS), other, decides=first)
    return _agreed(min([few, *_trips(first, other, wire, int(more))]), other, decides=first)


def _trips(first: bool, other: int, wire: Wire, count: int) -> list[float]:
    """Seconds of some round trips, seen by the one that begins them."""
    buffer = torch.zeros(PING_BYTES, dtype=torch.uint8)
    sends = [Message(buffer, other)]
    ready, *receives = [[Message(torch.empty_like(buffer), other)] for _ in range(count + 1)]
    for message in (ready, *receives):
        wire.expect(message)
    wire.exchange(sends, ready)  # what the other has posted is known here now
    seconds = []
    for message in receives:
        start = time.monotonic()
        if first:
            wire.exchange(sends, [])
            wire.exchange([], message)
        else:
            wire.exchange([], message)
            wire.exchange(sends, [])
        seconds.append(time.monotonic() - start)
    return seconds


def _rate(sends: bool, other: int, wire: Wire, trip_seconds: float) -> float:
    """Bytes a second of a steady stream, on both ends. The receiver decides how it goes on."""
    began, unsteady, chunk = time.monotonic(), 0, FIRST_BYTES // CHUNKS
    while True:
        stamps = _stream(sends, other, wire, chunk)
        if sends:
            found = Pace(0.0, 0.0, False)
        else:
            found = pace(stamps, chunk)
            long = is_long(found, trip_seconds) or chunk >= MOST_BYTES // CHUNKS
            unsteady += long and not found.steady
            ends = long and (found.steady or unsteady == UNSTEADY_STREAMS)
            late = time.monotonic() - began > BUDGET_SECONDS
            chunk = 0 if ends or late else next_chunk(chunk, found, trip_seconds)
        chunk = int(_agreed(chunk, other, decides=not sends))
        rate = _agreed(found.bytes_per_second, other, decides=not sends)
        if not chunk:
            return rate


def _stream(sends: bool, other: int, wire: Wire, chunk_bytes: int) -> list[float]:
    """When each chunk was there, on the receiver; empty on the sender."""
    buffer, go = torch.zeros(chunk_bytes, dtype=torch.uint8), torch.zeros(1)
    if sends:
        wire.exchange([], [Message(go, other)])
        for _ in range(CHUNKS):
            wire.exchange([Message(buffer, other)], [])
        return []
    receives = [[Message(buffer, other)] for _ in range(CHUNKS)]
    for message in receives:
        wire.expect(message)
    wire.exchange([Message(go, other)], [])
    stamps = []
    for message in receives:
        wire.exchange([], message)
        stamps.append(time.monotonic())
    return stamps


def _agreed(value: float, other: int, *, decides: bool) -> float:
    """What the one that decides has, on both."""
    word = torch.tensor([value], dtype=torch.float64)
    if decides:
        dist.send(word, other)
    else:
        dist.recv(word, other)
    return float(word[0])
