"""A schedule's computations as numpy columns, one entry per action: what the simulation and its analyses run on.

What an action waits for comes from `penstock.schedule.dependencies.REQUIREMENTS`, looked up for whole columns. They are
built rank by rank and in 32 bits: a schedule of 17 million actions has to fit into memory, with its times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ScheduleError
from penstock.schedule import Action, Dependencies, Op, Row, Schedule
from penstock.schedule.dependencies import REQUIREMENTS, Neighbors, Relation
from penstock.schedule.order import runnable_order

Ints = NDArray[Any]
Floats = NDArray[np.float64]

COMPUTE = tuple(op for op in Op if op.is_compute)
IS_COMPUTE = np.array([op.is_compute for op in Op])
"""By `Op.code`."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The F, B, I and W of a schedule, rank by rank. A node is an action's number.

    Attributes:
        rows: the actions of each rank, without messages and reductions.
        first: the first node of each rank, then the number of nodes.
        rank_of: the rank of each stage.
        op: `Op.code` of each node.
        joined: the nodes that overlap with the next one, ascending.
        need: the node on another rank that each node waits for; -1 if there is none. There is never more than one, and
            no two ranks wait for the same node: a forward feeds one stage, and so does a gradient.
        source: for each kind of node (see `kinds`), the stage whose actions it waits for on another rank; -1 if none.
    """

    rows: tuple[Row, ...]
    first: Ints
    rank_of: Ints
    op: Ints
    joined: Ints
    need: Ints
    source: Ints

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> Columns:
        """Raise ScheduleError if an action waits for one that is missing, or that comes later on the same rank, and if
        an action is out of range or on a rank that does not own its stage."""
        rows = tuple(map(_compute_only, schedule.rows))
        first = np.cumsum([0, *map(len, rows)])
        rank_of = np.array(schedule.placement.rank_of)
        needs = _needs(schedule, rows, first, rank_of)
        if needs is None:
            runnable_order(Dependencies(schedule.with_rows(rows)))  # reports what is missing, or waits for itself
            raise ScheduleError(
                f"schedule {schedule.name!r} has actions out of range or on a rank that does not own their stage; "
                "penstock.schedule.check says which"
            )
        return cls(rows, first, rank_of, *needs)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def rank(self) -> Ints:
        """The rank of each node."""
        return np.repeat(np.arange(self.ranks), np.diff(self.first))

    @property
    def stage(self) -> Ints:
        """The stage of each node."""
        return np.concatenate([column(row.stage) for row in self.rows])

    def nodes(self, rank: int) -> slice:
        """Return the nodes of a rank."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    def action(self, node: int) -> Action:
        """Return the action of a node."""
        rank = int(np.searchsorted(self.first, node, side="right")) - 1
        return self.rows[rank][node - int(self.first[rank])]

    def previous_ends(self, ends: Floats) -> Floats:
        """Return when each node's rank ended the node before; NaN for the first of a rank."""
        previous = np.roll(ends, 1)
        previous[self.first[:-1]] = np.nan
        return previous

    def kinds(self) -> Ints:
        """Return the kind of each node: `Op.code` * stages + stage."""
        kinds = np.empty(self.first[-1], np.int32)
        for part in _parts(self.rows, self.first):
            kinds[part.begin : part.begin + len(part.op)] = part.op.astype(np.int32) * self.stages + part.stage
        return kinds

    def numbers(self) -> Ints:
        """Return the microbatch of each node."""
        return np.concatenate([column(row.microbatch) for row in self.rows])


def column(values: array[Any]) -> NDArray[Any]:
    """Return a view of a row's or a track's column."""
    return np.frombuffer(values, dtype=values.typecode)


def _compute_only(row: Row) -> Row:
    """Return the row without messages and reductions; the row itself if it has none."""
    keep = IS_COMPUTE[column(row.op)]
    if keep.all():
        return row
    columns = (row.stage, row.op, row.microbatch, row.joined)
    return Row.from_columns(*(array(c.typecode, column(c)[keep].tobytes()) for c in columns))


_NODES_PER_PART = 500_000
"""How many nodes are processed at once: enough to be fast, and few enough that their memory does not matter."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The columns of some consecutive ranks, one rank after the other, and their first node."""

    begin: int
    rank: Ints
    op: Ints
    stage: Ints
    number: Ints
    joined: Ints


def _parts(rows: Sequence[Row], first: Ints) -> Iterator[_Part]:
    """Yield all ranks, in parts of about `_NODES_PER_PART` nodes."""
    start = 0
    for end in range(1, len(rows) + 1):
        if first[end] - first[start] >= _NODES_PER_PART or end == len(rows):
            columns = (
                np.concatenate([column(getattr(row, name)) for row in rows[start:end]])
                for name in ("op", "stage", "microbatch", "joined")
            )
            rank = np.repeat(np.arange(start, end), np.diff(first[start : end + 1]))
            yield _Part(int(first[start]), rank, *columns)
            start = end


def _needs(schedule: Schedule, rows: Sequence[Row], first: Ints, rank_of: Ints) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Return `Columns.op`, `joined`, `need` and `source`; None if an action is misplaced, or a need missing or late."""
    ops, joined = np.empty(first[-1], np.int8), []
    tables: dict[Op, Ints] = {}
    for part in _parts(rows, first):
        if not ((part.stage < schedule.stages) & (part.number < schedule.microbatches)).all():
            return None
        if (rank_of[part.stage] != part.rank).any():
            return None
        ops[part.begin : part.begin + len(part.op)] = part.op
        joined.append(part.begin + np.flatnonzero(part.joined))
        _index_nodes(tables, schedule, part)
    need, source = np.full(first[-1], -1, np.int32), np.full(len(Op) * schedule.stages, -1)
    neighbors = Neighbors(schedule)
    for part in _parts(rows, first):
        for op, nodes, stage, source_stage, position, producers in _iter_needs(schedule, neighbors, part, tables):
            needed = np.full(len(position), -1, np.int32)  # of the first producer in the schedule
            for table in (tables[op] for op in producers if op in tables):
                needed = np.where(needed < 0, table[position], needed)
            if source_stage is stage:
                if (needed < 0).any() or (needed >= nodes).any():
                    return None
                continue
            remote = rank_of[source_stage] != rank_of[stage]
            if (needed < 0).any() or (needed >= nodes)[~remote].any():
                return None
            need[nodes[remote]] = needed[remote]
            source[op.code * schedule.stages + stage[remote]] = source_stage[remote]
    return ops, np.concatenate(joined), need, source


def _index_nodes(tables: dict[Op, Ints], schedule: Schedule, part: _Part) -> None:
    """Write a part's nodes into the tables of their ops, each at its place: stage * numbers + number."""
    position = part.stage.astype(np.int64) * schedule.microbatches + part.number
    for op in COMPUTE:
        chosen = np.flatnonzero(part.op == op.code)[::-1]  # if an action occurs twice, the first counts
        if len(chosen):
            if op not in tables:
                tables[op] = np.full(schedule.stages * schedule.microbatches, -1, np.int32)
            tables[op][position[chosen]] = chosen + part.begin


def _iter_needs(
    schedule: Schedule, neighbors: Neighbors, part: _Part, ops: Iterable[Op]
) -> Iterator[tuple[Op, Ints, Ints, Ints, Ints, tuple[Op, ...]]]:
    """Yield, for each need of each op: the op, the nodes that have the need, their stages, the stages and positions
    of the actions that they need, and the ops that satisfy the need there. Nodes that need their own stage have the
    identical array for both."""
    for op in ops:
        chosen = np.flatnonzero(part.op == op.code)
        nodes, stage, number = part.begin + chosen, part.stage[chosen], part.number[chosen]
        for need in REQUIREMENTS[op]:
            source = stage
            if need.relation is not Relation.SAME:
                source = np.array(neighbors.below if need.relation is Relation.BELOW else neighbors.above)[stage]
            position = source * np.int64(schedule.microbatches) + number
            if source is stage or (exists := source >= 0).all():
                yield op, nodes, stage, source, position, need.ops
            elif exists.any():
                yield op, nodes[exists], stage[exists], source[exists], position[exists], need.ops
