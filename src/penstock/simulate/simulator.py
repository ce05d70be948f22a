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
    SECONDS_FIELD,
    LinkCost,
    Links,
    StageCost,
    StageCosts,
    cost_between,
    costs_by_microbatch,
)
from penstock.simulate.event_loop import NOT_RUN, compiled_run, run


@dataclass(frozen=True, slots=True)
class CostColumns:
    """The costs of all stages as arrays, by stage (S) and microbatch (N); N is 1 if costs do not depend on it. Costs of
    each action of a large schedule fit here, but not into as many `StageCost`s.

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
    def from_costs(cls, costs: Sequence[Sequence[StageCost]]) -> CostColumns:
        """Build the columns from each stage's one cost, or one for each microbatch."""
        seconds = np.zeros((len(Op), len(costs), max(map(len, costs))))
        for op, name in SECONDS_FIELD.items():
            seconds[op.code] = _by_number(costs, name)
        return cls(seconds, _by_number(costs, "output_bytes"), _by_number(costs, "overlapped_seconds"))


@dataclass(frozen=True, slots=True)
class Work:
    """The costs of nodes; nodes that cost the same share an entry in the tables.

    Attributes:
        entry: the entry of each node: its kind, or a separate one if it overlaps with another.
        seconds: how long it takes; for two that overlap, each one's share of the time that both take.
        lag: from when the message that it waits for leaves until it arrives.
        paired: whether it overlaps with the next node.
        hold: how long that next node takes.
    """

    entry: Ints
    seconds: Floats
    lag: Floats
    paired: NDArray[np.bool_]
    hold: Floats

    @classmethod
    def from_columns(cls, columns: Columns, costs: CostColumns, links: Links) -> Work:
        """Build the work of all nodes. Entries are kinds of nodes, or kinds by microbatch where costs differ by
        microbatch.

        Raises:
            ArgumentError: a link in use has no cost.
        """
        width = costs.seconds.shape[2]
        lag = _lags(columns, costs.output_bytes, links).ravel()
        entry = columns.kinds() if width == 1 else columns.kinds() * np.int64(width) + columns.numbers()
        work = cls(entry, costs.seconds.ravel(), lag, np.zeros(lag.size, bool), np.zeros(lag.size))
        return work._with_overlaps(columns, costs.overlapped_seconds.ravel()) if len(columns.joined) else work

    def _with_overlaps(self, columns: Columns, fused: Floats) -> Work:
        """Add an entry for each two nodes that overlap; pairs with the same entries share one.

        `fused` is how long two take together, by the stage (and number) of the forward; NaN if that is unknown.
        """
        entries = len(self.seconds)
        pairs = self.entry[columns.joined].astype(np.int64) * entries + self.entry[columns.joined + 1]
        distinct, index = np.unique(pairs, return_inverse=True)
        first, second = np.divmod(distinct, entries)
        total = fused[first % len(fused)]
        serial = self.seconds[first] + self.seconds[second]
        share = np.divide(self.seconds[first], serial, out=np.full(len(distinct), 0.5), where=serial > 0)
        has_total = ~np.isnan(total)
        first_seconds = np.where(has_total, total * share, self.seconds[first])
        # So that their end does not depend on how the share was rounded.
        second_seconds = np.where(has_total, total - first_seconds, self.seconds[second])
        entry = self.entry.copy()
        entry[columns.joined] = entries + index
        entry[columns.joined + 1] = entries + len(distinct) + index
        origin = np.concatenate([np.arange(entries), first, second])
        hold = np.concatenate([self.hold, second_seconds, np.zeros(len(distinct))])
        paired = np.concatenate([self.paired, np.ones(len(distinct), bool), np.zeros(len(distinct), bool)])
        seconds = np.concatenate([self.seconds, first_seconds, second_seconds])
        return Work(entry, seconds, self.lag[origin], paired, hold)


def _by_number(costs: Sequence[Sequence[StageCost]], name: str) -> Floats:
    """Return one field of all costs, by stage and microbatch; a single column if no stage's costs differ by microbatch.
    None becomes NaN."""
    table = np.empty((len(costs), max(map(len, costs))))
    for stage, stage_costs in enumerate(costs):
        table[stage] = np.array([getattr(cost, name) for cost in stage_costs], dtype=float)
    return table


def _lags(columns: Columns, output_bytes: Floats, links: Links) -> Floats:
    """Return, for each kind of node that waits for another rank and each microbatch, how long its message takes.
    `output_bytes`: of each stage, by microbatch."""
    lag = np.zeros((len(columns.source), output_bytes.shape[1]))
    used = np.flatnonzero(columns.source >= 0)
    stage, source = used % columns.stages, columns.source[used]
    # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
    message_bytes = output_bytes[np.minimum(stage, source)]
    if isinstance(links, LinkCost):
        lag[used] = links.latency_seconds + message_bytes / links.bytes_per_second
        return lag
    pairs = columns.rank_of[source] * columns.ranks + columns.rank_of[stage]
    for pair in np.unique(pairs).tolist():
        link, selected = cost_between(links, *divmod(pair, columns.ranks)), pairs == pair
        lag[used[selected]] = link.latency_seconds + message_bytes[selected] / link.bytes_per_second
    return lag


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[StageCosts],
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
    return simulate_with_columns(schedule, costs, links, begin=begin)[0]


def simulate_with_columns(
    schedule: Schedule,
    costs: StageCost | Sequence[StageCosts],
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> tuple[Timeline, Columns]:
    """Simulate as `simulate`; return the columns too, for `Waits.from_timeline`: building them may take a second."""
    by_stage = CostColumns.from_costs(costs_by_microbatch(schedule, costs))
    columns = Columns.from_schedule(schedule)
    return simulate_columns(schedule, columns, by_stage, links, begin=begin), columns


def simulate_columns(
    schedule: Schedule,
    columns: Columns,
    costs: CostColumns,
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> Timeline:
    """Simulate with the columns of the schedule and of its costs already built, to simulate it often.

    Raises:
        ArgumentError, ScheduleError: as `simulate`.
    """
    begins = np.zeros(schedule.ranks) if begin is None else np.array(begin, float)
    if begins.shape != (schedule.ranks,) or not (begins >= 0).all():
        raise ArgumentError(f"begin={begin}: expected a time of 0 or more for each of {schedule.ranks} ranks")
    starts, ends = _run(columns, Work.from_columns(columns, costs, links), begins) or (None, None)
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
    waits = []  # before each of a rank's actions
    for start_times, end_times in zip(start, end, strict=True):
        times = np.array(start_times)
        times[1:] -= column(end_times)[:-1]
        waits.append(_array(times))
    return Timeline(tuple(Track(*fields) for fields in zip(rows, start, end, waits, strict=True)))


def _run(columns: Columns, work: Work, begins: Floats) -> tuple[Floats, Floats] | None:
    """Compute when each node starts and ends; None if the ranks wait for each other in a circle."""
    nodes = int(columns.first[-1])
    inputs = [columns.first, columns.need, work.entry, work.seconds, work.lag, work.paired, work.hold]
    inputs += [np.zeros(columns.ranks, int), np.zeros(columns.ranks, int), begins]
    starts, ends = np.empty(nodes), np.full(nodes, NOT_RUN)
    if (compiled := compiled_run(nodes)) is not None:
        return (starts, ends) if not compiled(*inputs, starts, ends) else None
    # Python reads and writes lists faster than numpy's arrays.
    lists: list[Any] = [column.tolist() for column in (*inputs, starts, ends)]
    return (np.array(lists[-2]), np.array(lists[-1])) if not run(*lists) else None


def _array(times: Floats) -> array[float]:
    copy = array("d")
    copy.frombytes(np.ascontiguousarray(times).view(np.uint8).data)
    return copy
