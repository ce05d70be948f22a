"""Passes of every microbatch on every rank, such as over parts of a vocabulary, beside a schedule's own actions.

A pass runs on all ranks, each with its part, and ends in a collective: what waits for it waits for the slowest rank.

    OUTPUT     F(last, k) -> pass on every rank -> collective -> (next pass -> collective ->) B(last, k)
    INPUT      pass on every rank -> collective -> F(first, k)
    GRADIENT   B(first, k) -> pass on every rank

The rule for where a rank's row has them, from the schedule alone: in time slots, where a forward takes one and a
backward two, microbatch k's first output pass comes when F(last, k) has ended, and each further one when the next
microbatch's would, so that a collective has the time of a microbatch; but not after B(last, k) would start. An input
pass comes a microbatch ahead of its forward, and a gradient's a microbatch after its backward. Rows in an order of time
cannot wait in a circle. The passes are those of Yeung et al., "Balancing Pipeline Parallelism with Vocabulary
Parallelism", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from penstock.errors import ArgumentError
from penstock.schedule import Op, Schedule
from penstock.simulate.columns import Columns, Floats, Ints, column
from penstock.simulate.costs import StageCost
from penstock.simulate.simulator import simulate


class Side(Enum):
    """Where in a microbatch's way through the model a pass belongs."""

    INPUT = "before the first stage's forward"
    OUTPUT = "between the last stage's forward and its backward"
    GRADIENT = "after the first stage's backward"


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of every microbatch on every rank.

    Attributes:
        seconds: how long it takes: on every rank, or on each.
        collective_seconds: how long what follows it takes, once all ranks are there. Ranks go on meanwhile.

    Raises:
        ArgumentError: a time is negative.
    """

    name: str
    side: Side
    seconds: float | tuple[float, ...]
    collective_seconds: float = 0.0

    def __post_init__(self) -> None:
        for seconds in (*np.atleast_1d(self.seconds), self.collective_seconds):
            if not 0 <= seconds < np.inf:
                raise ArgumentError(f"pass {self.name!r} takes {seconds} s; expected a time of 0 or more")

    def on(self, ranks: int) -> Floats:
        """Its time on each rank. Raises ArgumentError if there are too few or too many."""
        each = np.asarray(self.seconds, float)
        if each.ndim and len(each) != ranks:
            raise ArgumentError(
                f"pass {self.name!r} has {len(each)} times for {ranks} ranks; give one, or one for each"
            )
        return np.broadcast_to(each, (ranks,))


@dataclass(frozen=True, slots=True)
class Placed:
    """One pass of one microbatch, and its place on every rank.

    Attributes:
        which: the pass's index.
        before: for each rank, before which of its computations it comes (their number: after the last).
    """

    which: int
    number: int
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """The nodes where microbatches enter and leave the passes, by number; -1 if there is none.

    Attributes:
        forward_first, forward_last: F on the first and the last stage.
        backward_first, backward_last: B or I there.
    """

    forward_first: Ints
    forward_last: Ints
    backward_first: Ints
    backward_last: Ints

    @classmethod
    def of(cls, schedule: Schedule, columns: Columns) -> Ends:
        kinds, numbers = columns.kinds(), columns.numbers()
        code, stage = np.divmod(kinds, columns.stages)
        first, last = (
            np.array([ends(one) for one in range(columns.stages)])[stage]
            for ends in (schedule.placement.is_first, schedule.placement.is_last)
        )
        backward = (code == Op.B.code) | (code == Op.I.code)
        found = []
        for chosen in ((code == Op.F.code) & first, (code == Op.F.code) & last, backward & first, backward & last):
            nodes = np.full(schedule.numbers, -1)
            nodes[numbers[chosen]] = np.flatnonzero(chosen)
            found.append(nodes)
        return cls(*found)


def placed(schedule: Schedule, passes: Sequence[Pass]) -> list[Placed]:
    """Where each rank runs the passes, in the order that all ranks keep."""
    columns = Columns.of(schedule)
    slots = simulate(schedule, StageCost(1.0, 1.0, 1.0)).tracks
    start, end = (np.concatenate([column(getattr(track, name)) for track in slots]) for name in ("start", "end"))
    start[columns.joined + 1] = start[columns.joined]  # two that overlap stay together
    end[columns.joined] = end[columns.joined + 1]
    ends = Ends.of(schedule, columns)
    starts = [start[columns.nodes(rank)] for rank in range(columns.ranks)]
    found = []
    for side in Side:
        of_side = [which for which, one in enumerate(passes) if one.side is side]
        for step, which in enumerate(of_side):
            for order, (time, number) in enumerate(_times(side, step, len(of_side), ends, start, end)):
                before = tuple(int(np.searchsorted(row, time)) for row in starts)
                found.append(((time, order, list(Side).index(side), step), Placed(which, number, before)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _times(side: Side, step: int, steps: int, ends: Ends, start: Floats, end: Floats) -> Iterator[tuple[float, int]]:
    """In which slot the passes of all microbatches come, the first microbatch first."""
    nodes, times = {
        Side.INPUT: (ends.forward_first, start),
        Side.OUTPUT: (ends.forward_last, end),
        Side.GRADIENT: (ends.backward_first, end),
    }[side]
    order = np.array(sorted(np.flatnonzero(nodes >= 0).tolist(), key=lambda number: (times[nodes[number]], number)))
    moments = [0.0, *times[nodes[order]].tolist(), np.inf] if len(order) else []
    for place, number in enumerate(order.tolist()):
        match side:
            case Side.INPUT:  # 1 + place is its own moment
                yield moments[max(0, 1 + place - (steps - step))], number
            case Side.OUTPUT:
                backward = ends.backward_last[number]
                until = start[backward] if backward >= 0 else np.inf
                yield min(moments[min(1 + place + step, len(moments) - 1)], until), number
            case Side.GRADIENT:
                yield moments[min(2 + place + step, len(moments) - 1)], number
