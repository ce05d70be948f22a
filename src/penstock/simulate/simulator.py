"""Schedule and costs -> Timeline: each action starts as soon as its rank and everything that it waits for allow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import Dependencies, Schedule
from penstock.schedule.order import runnable_order
from penstock.schedule.timeline import Timeline, Track
from penstock.simulate.computations import Columns, Floats, column
from penstock.simulate.costs import NO_COST, Links, OfStage, StageCost, costs_of_actions
from penstock.simulate.earliest import NOT_RUN, loop, run
from penstock.simulate.work import CostColumns, Work


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[OfStage],
    links: Links = NO_COST,
    *,
    begin: Sequence[float] | None = None,
) -> Timeline:
    """The timeline of a schedule whose actions all start as soon as their rank and everything they wait for allow.

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
    begins = _begins(schedule, begin)
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
    waited = [_waited(*times) for times in zip(start, end, strict=True)]
    return Timeline(tuple(Track(*of_rank) for of_rank in zip(rows, start, end, waited, strict=True)))


def _begins(schedule: Schedule, begin: Sequence[float] | None) -> Floats:
    begins = np.zeros(schedule.ranks) if begin is None else np.array(begin, float)
    if begins.shape != (schedule.ranks,) or not (begins >= 0).all():
        raise ArgumentError(f"begin={begin}: expected a time of 0 or more for each of {schedule.ranks} ranks")
    return begins


def _run(columns: Columns, work: Work, begins: Floats) -> tuple[Floats, Floats] | None:
    """When each node starts and ends; None if the ranks wait for each other in a circle."""
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


def _waited(start: array[float], end: array[float]) -> array[float]:
    """How long a rank waited before each of its actions."""
    waited = np.array(start)
    waited[1:] -= column(end)[:-1]
    return _array(waited)
