"""Schedule and costs -> Timeline: each action starts as soon as its rank and everything that it waits for allow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import Dependencies, Op, Schedule
from penstock.schedule.order import runnable_order
from penstock.schedule.timeline import Timeline, Track
from penstock.simulate.computations import Columns, Floats, Ints, column
from penstock.simulate.costs import (
    BOUND,
    NO_COST,
    SECONDS_OF,
    LinkCost,
    Links,
    OfStage,
    StageCost,
    cost_between,
    costs_of_actions,
)
from penstock.simulate.earliest import NOT_RUN, loop, run


@dataclass(frozen=True, slots=True)
class CostColumns:
    """What a simulation needs of all stages' costs, by stage (S) and number (N), of which there is one where costs do
    not depend on it. A cost for each action of a large schedule fits here, and not into as many `StageCost`s.

    Attributes:
        seconds: how long an op takes, by `Op.code`, [len(Op), S, N].
        output_bytes: of a message to the next stage, [S, N].
        overlapped_seconds: a forward together with the backward of another microbatch, [S, N]; NaN: as long as both.

    Raises:
        ArgumentError: a time is negative or beyond `BOUND`.
    """

    seconds: Floats
    output_bytes: Floats
    overlapped_seconds: Floats

    def __post_init__(self) -> None:
        if not ((self.seconds >= 0) & (self.seconds < BOUND)).all():
            raise ArgumentError(f"an action takes {self.seconds.min()} s; expected 0 or more, below {BOUND:g}")

    @classmethod
    def of(cls, costs: Sequence[Sequence[StageCost]]) -> CostColumns:
        """Build the columns from each stage's one cost, or one for each microbatch."""
        seconds = np.zeros((len(Op), len(costs), max(map(len, costs))))
        for op, name in SECONDS_OF.items():
            seconds[op.code] = _by_number(costs, name)
        return cls(seconds, _by_number(costs, "output_bytes"), _by_number(costs, "overlapped_seconds"))

    @classmethod
    def of_seconds(cls, seconds: Floats) -> CostColumns:
        """Build the columns from times alone: messages have no bytes."""
        shape = seconds.shape[1:]
        return cls(seconds, np.zeros(shape), np.full(shape, np.nan))


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes that cost the same share an entry in the tables.

    Attributes:
        of: for each node, its entry: its kind, or one of its own if it overlaps with another.
        seconds: how long it takes; for two that overlap, each one's share of the time that both take.
        lag: from when the message that it waits for leaves until it arrives.
        paired: whether it overlaps with the next node.
        hold: how long that next node takes.
    """

    of: Ints
    seconds: Floats
    lag: Floats
    paired: NDArray[np.bool_]
    hold: Floats

    @classmethod
    def of_columns(cls, columns: Columns, costs: CostColumns, links: Links) -> Work:
        """Build the work of all nodes. Entries are kinds of nodes, or kinds by microbatch where costs differ by
        microbatch.

        Raises:
            ArgumentError: a link in use has no cost.
        """
        width = costs.seconds.shape[2]
        lag = _lags(columns, costs.output_bytes, links).ravel()
        of = columns.kinds() if width == 1 else columns.kinds() * np.int64(width) + columns.numbers()
        plain = cls(of, costs.seconds.ravel(), lag, np.zeros(lag.size, bool), np.zeros(lag.size))
        return plain._with_overlaps(columns, costs.overlapped_seconds.ravel()) if len(columns.joined) else plain

    def _with_overlaps(self, columns: Columns, fused: Floats) -> Work:
        """Add an entry for each two nodes that overlap; pairs with the same entries share one.

        `fused` is how long two take together, by the stage (and number) of the forward; NaN if that is unknown.
        """
        entries = len(self.seconds)
        pairs = self.of[columns.joined].astype(np.int64) * entries + self.of[columns.joined + 1]
        both, which = np.unique(pairs, return_inverse=True)
        one, two = np.divmod(both, entries)
        total = fused[one % len(fused)]
        apart = self.seconds[one] + self.seconds[two]
        share = np.divide(self.seconds[one], apart, out=np.full(len(both), 0.5), where=apart > 0)
        known = ~np.isnan(total)
        first = np.where(known, total * share, self.seconds[one])
        # So that their end does not depend on how the share was rounded.
        second = np.where(known, total - first, self.seconds[two])
        of = self.of.copy()
        of[columns.joined] = entries + which
        of[columns.joined + 1] = entries + len(both) + which
        old = np.concatenate([np.arange(entries), one, two])
        hold = np.concatenate([self.hold, second, np.zeros(len(both))])
        paired = np.concatenate([self.paired, np.ones(len(both), bool), np.zeros(len(both), bool)])
        seconds = np.concatenate([self.seconds, first, second])
        return Work(of, seconds, self.lag[old], paired, hold)


def _by_number(costs: Sequence[Sequence[StageCost]], name: str) -> Floats:
    """Return one field of all costs, by stage and microbatch; a single column if no stage's costs differ by microbatch.
    None becomes NaN."""
    found = np.empty((len(costs), max(map(len, costs))))
    for stage, each in enumerate(costs):
        found[stage] = np.array([getattr(cost, name) for cost in each], dtype=float)
    return found


def _lags(columns: Columns, size: Floats, links: Links) -> Floats:
    """Return, for each kind of node that waits for another rank and each microbatch, how long its message takes.
    `size`: of each stage's output, by microbatch."""
    lag = np.zeros((len(columns.source), size.shape[1]))
    used = np.flatnonzero(columns.source >= 0)
    stage, source = used % columns.stages, columns.source[used]
    # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
    crossing = size[np.minimum(stage, source)]
    if isinstance(links, LinkCost):
        lag[used] = links.latency_seconds + crossing / links.bytes_per_second
        return lag
    pairs = columns.rank_of[source] * columns.ranks + columns.rank_of[stage]
    for pair in np.unique(pairs).tolist():
        link, on = cost_between(links, *divmod(pair, columns.ranks)), pairs == pair
        lag[used[on]] = link.latency_seconds + crossing[on] / link.bytes_per_second
    return lag


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[OfStage],
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> Timeline:
    """Simulate a schedule whose actions all start as soon as their rank and everything they wait for allow.

    A dependency that crosses ranks costs its link once. The schedule's own messages, if it has any, are left out: the
    link accounts for their cost. Reductions take no time and are left out too. Two actions that overlap start together
    and end together; in between, the timeline shows them one after the other.

    >>> from penstock.schedule import generate
    >>> from penstock.simulate import StageCost
    >>> timeline = simulate(generate("1f1b", ranks=2, microbatches=2), StageCost(1.0, 1.0, 1.0))
    >>> timeline.makespan_seconds, round(timeline.bubble_rate, 3)
    (9.0, 0.333)
    >>> for span in timeline.spans(1):
    ...     print(span.action, span.start_seconds, span.end_seconds)
    1F0 1.0 2.0
    1B0 2.0 4.0
    1F1 4.0 5.0
    1B1 5.0 7.0

    Args:
        schedule: with or without messages.
        costs: one for every stage, or one each; a stage's may be a sequence, with one for each microbatch. With several
            pipelines, for the stages of one, or of all.
        links: one cost between any two ranks, or costs by (sending rank, receiving rank). A link carries any number of
            messages at once.
        begin: when each rank begins, in seconds; by default all at 0.

    Raises:
        ArgumentError: not one cost for each stage (or microbatch), a link in use has no cost, or not one `begin` of 0
            or more for each rank.
        ScheduleError: the schedule cannot be run.
    """
    return timed(schedule, costs, links, begin=begin)[0]


def timed(
    schedule: Schedule,
    costs: StageCost | Sequence[OfStage],
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> tuple[Timeline, Columns]:
    """`simulate`, and the columns that it made, for `Waits.of`: in a large schedule, to make them takes a second."""
    by_stage = CostColumns.of(costs_of_actions(schedule, costs))
    columns = Columns.of(schedule)
    return timed_columns(schedule, columns, by_stage, links, begin=begin), columns


def timed_columns(
    schedule: Schedule,
    columns: Columns,
    costs: CostColumns,
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> Timeline:
    """`simulate` with the schedule's columns already made, and costs as columns, for those who simulate it often.

    Raises:
        ArgumentError, ScheduleError: as `simulate`.
    """
    begins = np.zeros(schedule.ranks) if begin is None else np.array(begin, float)
    if begins.shape != (schedule.ranks,) or not (begins >= 0).all():
        raise ArgumentError(f"begin={begin}: expected a time of 0 or more for each of {schedule.ranks} ranks")
    starts, ends = _run(columns, Work.of_columns(columns, costs, links), begins) or (None, None)
    if starts is None or ends is None:
        runnable_order(Dependencies(schedule.with_rows(columns.rows)))  # reports which action waits for which
        raise ScheduleError(
            f"schedule {schedule.name!r} has a deadlock: the backward of an overlap waits for what its own "
            "forward must come before; write the two as separate actions"
        )
    rows, ranks = columns.rows, [columns.nodes(rank) for rank in range(columns.ranks)]
    # One column after the other, so that no more than one of them is in memory twice.
    start = [_array(starts[nodes]) for nodes in ranks]
    del starts
    end = [_array(ends[nodes]) for nodes in ranks]
    del ends
    waited = []  # before each of a rank's actions
    for began, ended in zip(start, end, strict=True):
        times = np.array(began)
        times[1:] -= column(ended)[:-1]
        waited.append(_array(times))
    return Timeline(tuple(Track(*of_rank) for of_rank in zip(rows, start, end, waited, strict=True)))


def _run(columns: Columns, work: Work, begins: Floats) -> tuple[Floats, Floats] | None:
    """Compute when each node starts and ends; None if the ranks wait for each other in a circle."""
    nodes = int(columns.first[-1])
    given = [columns.first, columns.need, work.of, work.seconds, work.lag, work.paired, work.hold]
    given += [np.zeros(columns.ranks, int), np.zeros(columns.ranks, int), begins]
    starts, ends = np.empty(nodes), np.full(nodes, NOT_RUN)
    if (compiled := loop(nodes)) is not None:
        return (starts, ends) if not compiled(*given, starts, ends) else None
    # Python reads and writes lists faster than numpy's arrays.
    lists: list[Any] = [column.tolist() for column in (*given, starts, ends)]
    return (np.array(lists[-2]), np.array(lists[-1])) if not run(*lists) else None


def _array(times: Floats) -> array[float]:
    made = array("d")
    made.frombytes(np.ascontiguousarray(times).view(np.uint8).data)
    return made
