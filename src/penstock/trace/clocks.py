"""Clocks that disagree, set right by messages: nothing can be used before it was made.

Where messages arrive after they were sent, clocks are taken as they are. Otherwise each rank's is set so that a message
takes as long to its neighbor as back, as NTP does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.simulate.computations import Columns, Floats

TOLERANCE = 0.01
"""The share of a median action by which a message may seem to arrive too early: traces round, and are late."""
LEAST_SECONDS = 1e-5


def shifts(columns: Columns, starts: Floats, ends: Floats, *, with_waits: bool) -> list[float]:
    """Return what to add to each rank's clock; zeros if they agree: if most messages arrive after they were sent.

    A single one may not: a rank may be held up between its message and the end of the action that made it, but no
    message arrives before that begins.

    Args:
        columns: what ran.
        starts, ends: of its nodes, each on its rank's own clock.
        with_waits: whether a span begins with the wait, so that only its end tells when a message had arrived.
    """
    ranks, usual = columns.ranks, dict(_usual(columns, starts, ends, with_waits=with_waits))
    if not any(one.early for one in usual.values()):
        return [0.0] * ranks
    neighbors = defaultdict(set)
    for one, two in usual:
        neighbors[one].add(two)
        neighbors[two].add(one)
    found = {0: 0.0}
    queue = [0]
    while queue:
        rank = queue.pop(0)
        for other in sorted(neighbors[rank] - found.keys()):
            found[other] = found[rank] + _ahead(usual, rank, other)
            queue.append(other)
    return [found.get(rank, 0.0) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class _Way:
    """How long messages take from one rank to another.

    Attributes:
        early: whether they seem to arrive before they were sent, and no single interruption explains that.
        fastest: those that took least, whose receiver had nothing else to do: clocks are set by them, as by NTP.
        known: whether any was waited for. Otherwise messages take at most as long as the fastest.
    """

    early: bool
    fastest: float
    known: bool


def _usual(
    columns: Columns, starts: Floats, ends: Floats, *, with_waits: bool
) -> Iterator[tuple[tuple[int, int], _Way]]:
    """Yield, for each pair of ranks, how long a message takes; only messages that were waited for tell."""
    tolerance = tolerance_of(starts, ends)
    users = np.flatnonzero(columns.need >= 0)
    makers = columns.need[users]
    rank = columns.rank
    source, target = rank[makers], rank[users]
    seconds = (ends if with_waits else starts)[users] - ends[makers]
    busy = (starts - columns.previous_ends(ends))[users] <= tolerance  # right before
    early = seconds < -tolerance
    impossible = seconds < -tolerance - (ends - starts)[makers]
    for one, two in sorted(set(zip(source.tolist(), target.tolist(), strict=True))):
        chosen = (source == one) & (target == two)
        waited = chosen & (~busy | with_waits)
        known = bool(waited.any())
        usually = not known or 2 * (waited & early).sum() > waited.sum()
        several = usually and (chosen & early).sum() > 1
        fastest = float(seconds[waited if known else chosen].min())
        yield (one, two), _Way(bool(several or (chosen & impossible).any()), fastest, known)


def _ahead(usual: dict[tuple[int, int], _Way], rank: int, other: int) -> float:
    """Return what to add to the other's clock so that it agrees with this one's."""
    there, back = usual.get((rank, other)), usual.get((other, rank))
    if there is None or back is None:
        return -there.fastest if there else back.fastest if back else 0.0
    if there.known == back.known:
        return (back.fastest - there.fastest) / 2
    return -there.fastest if there.known else back.fastest


def tolerance_of(starts: Floats, ends: Floats) -> float:
    """Return by how much a message may seem to arrive too early."""
    return max(LEAST_SECONDS, TOLERANCE * float(np.median(ends - starts)))
