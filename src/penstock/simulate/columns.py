"""A schedule's computations as numpy columns, one entry per action: what the simulation and its analyses run on.

What an action waits for comes from the table `penstock.schedule.dependencies.NEEDS`, looked up for whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule import Dependencies, Op, Row, Schedule
from penstock.schedule.dependencies import NEEDS, Neighbours, Where
from penstock.schedule.order import runnable_order

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

COMPUTE = tuple(op for op in Op if op.is_compute)
COMPUTE_CODES = np.array([op.code for op in COMPUTE])


@dataclass(frozen=True, slots=True)
class Columns:
    """The F, B, I and W of a schedule, rank by rank. A node is an action's number.

    Attributes:
        rows: the actions of each rank, without messages and reductions.
        first: the first node of each rank, then the number of nodes.
        rank, op, stage: of each node; `op` holds `Op.code`.
        joined: whether a node overlaps with the next one.
        need: the node on another rank that each node waits for; -1 if there is none. There is never more than one, and
            no two ranks wait for the same node: a forward feeds one stage, and so does a gradient.
    """

    rows: tuple[Row, ...]
    first: Ints
    rank: Ints
    op: Ints
    stage: Ints
    joined: NDArray[np.bool_]
    need: Ints

    @classmethod
    def of(cls, schedule: Schedule) -> Columns:
        """Raises ScheduleError if an action waits for one that is missing, or that comes later on the same rank, and if
        an action is out of range or on a rank that does not own its stage.
        """
        rows = tuple(map(_compute_only, schedule.rows))
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(lengths)])
        rank = np.repeat(np.arange(len(rows)), lengths)
        op, stage, number, joined = (
            np.concatenate([np.frombuffer(getattr(row, name), dtype=getattr(row, name).typecode) for row in rows])
            for name in ("op", "stage", "microbatch", "joined")
        )
        stage, number = stage.astype(np.int64), number.astype(np.int64)
        placed = bool(((stage < schedule.stages) & (number < schedule.numbers)).all())
        placed = placed and bool((np.array(schedule.placement.rank_of)[stage] == rank).all())
        need = _needs(schedule, rank, op, stage, number) if placed else None
        if need is None:
            runnable_order(Dependencies(schedule.with_rows(rows)))  # reports what is missing, or waits for itself
            raise ScheduleError(
                f"schedule {schedule.name!r} has actions out of range or on a rank that does not own their stage; "
                "penstock.schedule.check says which"
            )
        return cls(rows, first, rank, op.astype(np.int64), stage, joined.astype(bool), need)


def _compute_only(row: Row) -> Row:
    """The row without messages and reductions; the row itself if it has none."""
    if not len(row):
        return row
    op = np.frombuffer(row.op, dtype=row.op.typecode)
    keep = np.isin(op, COMPUTE_CODES)
    if keep.all():
        return row
    return Row(item for item in row.items() if item.parts[0].op.is_compute)


def _needs(schedule: Schedule, rank: Ints, op: Ints, stage: Ints, number: Ints) -> Ints | None:
    """For each node, the one that it waits for on another rank, or -1. None if a need is missing or comes too late."""
    place = stage * schedule.numbers + number
    nodes = {kind: np.flatnonzero(op == kind.code) for kind in COMPUTE}
    table = {}
    for kind, chosen in nodes.items():
        if len(chosen):
            table[kind] = np.full(schedule.stages * schedule.numbers, -1)
            table[kind][place[chosen[::-1]]] = chosen[::-1]  # if an action occurs twice, the first counts
    remote = np.full(len(op), -1)
    for kind in table:
        for where, ops in _found(schedule, stage[nodes[kind]], number[nodes[kind]], kind):
            there = where >= 0
            waiting, wanted = (nodes[kind], where) if there.all() else (nodes[kind][there], where[there])
            needed = np.full(len(waiting), -1)
            for other in (other for other in ops if other in table):
                needed = np.where(needed < 0, table[other][wanted], needed)
            if len(needed) and needed.min() < 0:
                return None
            here = rank[needed] == rank[waiting]
            if (here & (needed >= waiting)).any():
                return None
            remote[waiting[~here]] = needed[~here]
    return remote


def _found(schedule: Schedule, stage: Ints, number: Ints, kind: Op) -> Iterator[tuple[Ints, tuple[Op, ...]]]:
    """For each need of `kind`: the place (stage * numbers + number, or -1) that it looks at, and the ops."""
    neighbours = Neighbours(schedule)
    below, above = np.array(neighbours.below), np.array(neighbours.above)
    slices, numbers = schedule.slices, schedule.numbers
    none = np.int64(-1)
    for need in NEEDS[kind]:
        match need.where:
            case Where.SAME:
                yield stage * numbers + number, need.ops
            case Where.BELOW | Where.ABOVE:
                other = (below if need.where is Where.BELOW else above)[stage]
                yield np.where(other >= 0, other * numbers + number, none), need.ops
            case Where.EARLIER:
                if slices > 1:
                    yield np.where(number % slices > 0, stage * numbers + number - 1, none), need.ops
            case Where.LATER:
                if slices > 1:
                    yield np.where((number + 1) % slices > 0, stage * numbers + number + 1, none), need.ops
