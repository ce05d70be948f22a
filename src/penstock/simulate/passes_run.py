"""A schedule timed with passes of every microbatch on every rank: see `penstock.simulate.passes`.

A collective is a row of its own beside those of the ranks, as a communicator is a queue of its own. For each
microbatch it has a node for the arrival of each rank, the last of which takes as long as the collective, and one for
each rank that goes on from there. So the simulation's loop knows nothing of passes: each node still waits for one other
at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline, Track
from penstock.simulate.columns import Columns, Floats, Ints
from penstock.simulate.costs import NO_COST, Links, OfStage, StageCost, costs_of_actions
from penstock.simulate.earliest import NOT_RUN, loop, run
from penstock.simulate.passes import Ends, Pass, Placed, Side, placed
from penstock.simulate.work import CostColumns, Work


@dataclass(frozen=True, slots=True)
class PassSpan:
    """A pass of one microbatch on one rank."""

    rank: int
    name: str
    number: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class WithPasses:
    """A schedule's timeline with passes.

    Attributes:
        timeline: of the schedule's own actions.
        spans: of the passes, by rank, in order.
    """

    timeline: Timeline
    spans: tuple[tuple[PassSpan, ...], ...]

    @property
    def ends(self) -> list[float]:
        """When each rank has done its last action or pass."""
        return [
            max([*track.end[-1:], *(span.end_seconds for span in spans[-1:])], default=0.0)
            for track, spans in zip(self.timeline.tracks, self.spans, strict=True)
        ]

    @property
    def makespan_seconds(self) -> float:
        return max(self.ends)

    def pass_seconds(self, rank: int) -> float:
        """How long a rank is busy with passes."""
        return sum(span.end_seconds - span.start_seconds for span in self.spans[rank])

    def idle_seconds(self, rank: int) -> float:
        """How long a rank does nothing until the last one is done."""
        return self.makespan_seconds - self.timeline.busy_seconds(rank) - self.pass_seconds(rank)


def simulate_with(
    schedule: Schedule,
    costs: StageCost | Sequence[OfStage],
    passes: Sequence[Pass],
    links: Links = NO_COST,
    *,
    contended: bool = False,
) -> WithPasses:
    """The timeline of a schedule with passes, all of whose parts start as soon as they can in their rank's order.

    Args:
        schedule, costs, links, contended: as for `simulate`.
        passes: in the order in which a microbatch meets them, for each `Side`.

    Raises:
        ArgumentError, ScheduleError: as `simulate`; or a pass has too few times or too many.
    """
    by_stage = CostColumns.of(costs_of_actions(schedule, costs))
    columns = Columns.of(schedule)
    work = Work.of_columns(columns, by_stage, links)
    graph = _Graph.of(schedule, columns, work, passes, placed(schedule, passes))
    starts, ends = _timed(graph, work, contended=contended)
    tracks, spans = [], []
    for rank, row in enumerate(columns.rows):
        own = graph.base[columns.nodes(rank)]
        start, end = array("d", starts[own].tolist()), array("d", ends[own].tolist())
        chosen = [one for one in graph.passes if one.rank == rank]
        before = np.concatenate([[0.0], ends])[own] * (own > graph.first[rank])
        tracks.append(Track(row, start, end, array("d", (starts[own] - before).tolist())))
        spans.append(
            tuple(
                PassSpan(rank, passes[one.which].name, one.number, float(starts[one.node]), float(ends[one.node]))
                for one in chosen
            )
        )
    return WithPasses(Timeline(tuple(tracks)), tuple(spans))


@dataclass(frozen=True, slots=True)
class _PassNode:
    """A pass of a microbatch on a rank."""

    rank: int
    which: int
    number: int
    node: int


_Key = tuple[int, int, int]
"""A pass's index, the number of a microbatch, and a rank."""


@dataclass(slots=True)
class _Rows:
    """Rows of nodes that are being written: what each needs, and which entry of the tables it is."""

    need: list[int] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)

    def add(self, need: int, entry: int) -> int:
        self.need.append(need)
        self.entry.append(entry)
        return len(self.need) - 1


@dataclass(frozen=True, slots=True)
class _Graph:
    """The nodes of ranks and collectives.

    Attributes:
        first: the first node of each row, ranks before collectives; then how many there are.
        need, entry: of each node: which it waits for on another row, and its entry in the tables.
        seconds: how long entries take that come after those of the schedule's own nodes.
        base: the node of each of the schedule's own.
        passes: the nodes of passes, rank by rank, in order.
    """

    first: Ints
    need: Ints
    entry: Ints
    seconds: Floats
    base: Ints
    passes: tuple[_PassNode, ...]

    @classmethod
    def of(
        cls, schedule: Schedule, columns: Columns, work: Work, passes: Sequence[Pass], order: Sequence[Placed]
    ) -> _Graph:
        ranks, own = columns.ranks, len(work.seconds)
        taken = [one.on(ranks) for one in passes]
        seconds = np.concatenate([[0.0], *taken, [one.collective_seconds for one in passes]])
        rows = _Rows()
        base = np.empty(int(columns.first[-1]), int)
        nodes: dict[_Key, int] = {}
        found, first = [], [0]
        for rank in range(ranks):
            places = [one.before[rank] for one in order]
            coming = sorted(range(len(order)), key=places.__getitem__)
            at = 0
            for place, node in enumerate([*range(columns.first[rank], columns.first[rank + 1]), -1]):
                while at < len(coming) and places[coming[at]] == place:
                    one = order[coming[at]]
                    made = rows.add(-1, own + 1 + one.which * ranks + rank)
                    nodes[one.which, one.number, rank] = made
                    found.append(_PassNode(rank, one.which, one.number, made))
                    at += 1
                if node >= 0:
                    base[node] = rows.add(int(columns.need[node]), int(work.of[node]))
            first.append(len(rows.need))
        for node in base.tolist():
            if rows.need[node] >= 0:
                rows.need[node] = int(base[rows.need[node]])
        _add_collectives(rows, first, Ends.of(schedule, columns), base, passes, order, nodes, ranks, own)
        return cls(np.array(first), np.array(rows.need), np.array(rows.entry), seconds, base, tuple(found))


def _add_collectives(
    rows: _Rows, first: list[int], ends: Ends, base: Ints, passes: Sequence[Pass], order: Sequence[Placed],
    nodes: Mapping[_Key, int], ranks: int, own: int,
) -> None:  # fmt: skip
    """Writes the rows of collectives: before the first pass of each side, between passes, and after the last one."""
    nothing, collective = own, own + 1 + len(passes) * ranks
    for side in Side:
        chain = [which for which, one in enumerate(passes) if one.side is side]
        numbers = {which: [one.number for one in order if one.which == which] for which in chain}
        source, target = {
            Side.INPUT: (None, ends.forward_first),
            Side.OUTPUT: (ends.forward_last, ends.backward_last),
            Side.GRADIENT: (ends.backward_first, None),
        }[side]
        if source is not None and chain:
            for number in numbers[chain[0]]:
                for rank in range(ranks):
                    made = rows.add(int(base[source[number]]) if rank == 0 else -1, nothing)
                    rows.need[nodes[chain[0], number, rank]] = made
            first.append(len(rows.need))
        for which, after in zip(chain, [*chain[1:], None], strict=False):
            for number in numbers[which]:
                for rank in range(ranks):
                    last = rank == ranks - 1
                    arrived = rows.add(nodes[which, number, rank], collective + which if last else nothing)
                if after is not None:
                    for rank in range(ranks):
                        rows.need[nodes[after, number, rank]] = rows.add(-1, nothing)
                elif target is not None and target[number] >= 0:
                    rows.need[int(base[target[number]])] = arrived
            first.append(len(rows.need))


def _timed(graph: _Graph, work: Work, *, contended: bool) -> tuple[Floats, Floats]:
    """When each node starts and ends."""
    more, nodes, rows = len(graph.seconds), len(graph.need), len(graph.first) - 1
    none = np.zeros(more)
    tables = [
        np.concatenate([table, added])
        for table, added in (
            (work.seconds, graph.seconds), (work.latency if contended else work.lag, none),
            (work.paired, none.astype(bool)), (work.hold, none), (work.wire, none), (work.link, none.astype(int) - 1),
        )
    ]  # fmt: skip
    room = [np.zeros(rows, int), np.zeros(rows, int), np.zeros(work.links), np.zeros(rows)]
    starts, left = np.empty(nodes), np.full(nodes, NOT_RUN)
    ends = np.empty(nodes) if contended else left
    given = [graph.first, graph.need, graph.entry, *tables]
    if (compiled := loop(nodes)) is not None:
        stuck = compiled(*given, contended, *room, left, starts, ends)
    else:
        lists = [one.tolist() for one in (*given, *room, left, starts)]
        ended = ends.tolist() if contended else lists[-2]
        everything: list[Any] = [*lists[: len(given)], contended, *lists[len(given) :], ended]
        stuck = run(*everything)
        starts, ends = np.array(lists[-1]), np.array(ended)
    if stuck:
        raise ScheduleError("the passes wait for each other in a circle")
    return starts, ends
