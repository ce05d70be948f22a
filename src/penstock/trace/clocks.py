"""Corrects clocks that disagree by messages: nothing can be used before it was made.

Where messages arrive after they were sent, clocks are taken as they are. Otherwise each rank's clock is set so that a
message takes as long to its neighbor as back, as NTP does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.simulate.computations import Columns, Floats

_TOLERANCE = 0.01
"""The share of a median action by which a message may seem to arrive too early: traces round, and are late."""
_MIN_SECONDS = 1e-5


def clock_offsets(columns: Columns, starts: Floats, ends: Floats, *, with_waits: bool) -> list[float]:
    """Return what to add to each rank's clock; zeros if they agree: if most messages arrive after they were sent.

    A single message may not: a rank may be held up between its message and the end of the action that made it, but no
    message arrives before that begins.

    Args:
        columns: what ran.
        starts, ends: of its nodes, each on its rank's own clock.
        with_waits: whether a span begins with the wait, so that only its end bounds the arrival of a message.
    """
    ranks, delays = columns.ranks, dict(_message_delays(columns, starts, ends, with_waits=with_waits))
    if not any(delay.early for delay in delays.values()):
        return [0.0] * ranks
    neighbors = defaultdict(set)
    for first, second in delays:
        neighbors[first].add(second)
        neighbors[second].add(first)
    offsets = {0: 0.0}
    queue = [0]
    while queue:
        rank = queue.pop(0)
        for other in sorted(neighbors[rank] - offsets.keys()):
            offsets[other] = offsets[rank] + _offset_between(delays, rank, other)
            queue.append(other)
    return [offsets.get(rank, 0.0) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class _DirectionDelays:
    """The time that messages take from one rank to another.

    Attributes:
        early: whether they seem to arrive before they were sent, and no single interruption explains that.
        fastest: the least seconds, of messages whose receiver was idle: clocks are set by them, as by NTP.
        waited: whether any was waited for. Otherwise messages take at most as long as the fastest.
    """

    early: bool
    fastest: float
    waited: bool


def _message_delays(
    columns: Columns, starts: Floats, ends: Floats, *, with_waits: bool
) -> Iterator[tuple[tuple[int, int], _DirectionDelays]]:
    """Yield, for each pair of ranks, how long a message takes, by the messages that were waited for."""
    tolerance = arrival_tolerance(starts, ends)
    consumers = np.flatnonzero(columns.need >= 0)
    producers = columns.need[consumers]
    rank = columns.rank
    source, target = rank[producers], rank[consumers]
    seconds = (ends if with_waits else starts)[consumers] - ends[producers]
    busy = (starts - columns.previous_ends(ends))[consumers] <= tolerance  # right before
    early = seconds < -tolerance
    impossible = seconds < -tolerance - (ends - starts)[producers]
    for first, second in sorted(set(zip(source.tolist(), target.tolist(), strict=True))):
        selected = (source == first) & (target == second)
        waited = selected & (~busy | with_waits)
        any_waited = bool(waited.any())
        mostly = not any_waited or 2 * (waited & early).sum() > waited.sum()
        repeated = mostly and (selected & early).sum() > 1
        fastest = float(seconds[waited if any_waited else selected].min())
        yield (first, second), _DirectionDelays(bool(repeated or (selected & impossible).any()), fastest, any_waited)


def _offset_between(delays: dict[tuple[int, int], _DirectionDelays], rank: int, other: int) -> float:
    """Return what to add to the other rank's clock so that it agrees with this rank's."""
    forth, back = delays.get((rank, other)), delays.get((other, rank))
    if forth is None or back is None:
        return -forth.fastest if forth else back.fastest if back else 0.0
    if forth.waited == back.waited:
        return (back.fastest - forth.fastest) / 2
    return -forth.fastest if forth.waited else back.fastest


def arrival_tolerance(starts: Floats, ends: Floats) -> float:
    """Return by how much a message may seem to arrive too early."""
    return max(_MIN_SECONDS, _TOLERANCE * float(np.median(ends - starts)))
