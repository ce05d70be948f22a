"""The question that a search answers, as plain numbers: lanes, how long they take, what waits for what, what is held.

A lane is one op of one stage: F, I or W. Its microbatches run in ascending order, so that gradients are added as one
device adds them. A rank's order of work is then just a row of lanes: the k-th time a lane occurs, its k-th microbatch
runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock._base.errors import ArgumentError, check_counts
from penstock.schedule import Op, Placement, Row, Schedule
from penstock.simulate import NO_COST, Links
from penstock.simulate.costs import StageCost, cost_between, costs_by_stage

Objective = Literal["makespan", "span"]
"""What to minimize: the last end, counted from 0, or the maximum over ranks of the time from first F to last end."""

Rows = list[list[int]]
"""For each rank, its lanes in order."""

OPS = (Op.F, Op.I, Op.W)
_INDEX_BY_CODE = {op.code: index for index, op in enumerate(OPS)}
_SLACK = 1e-9  # of the limit: sums of floats may differ in their last bits


@dataclass(frozen=True, slots=True)
class Problem:
    """Lane 3 * stage + (0, 1, 2 for F, I, W).

    Attributes:
        placement, microbatches, objective: those of `search`.
        seconds: the duration of each lane.
        need: the lane of another stage that must run the same microbatch first; -1 if there is none.
        lag: from its end to the message's arrival, in seconds.
        feeds: the lane that needs this one; -1 if there is none.
        count: how many microbatches each lane has.
        held: for each stage, what a microbatch keeps from the start of F, or more after I.
        kept: for each stage, the part of it that W frees; I frees the rest.
        limit: the most that each rank may hold.
    """

    placement: Placement
    microbatches: int
    objective: Objective
    seconds: tuple[float, ...]
    need: tuple[int, ...]
    lag: tuple[float, ...]
    feeds: tuple[int, ...]
    count: tuple[int, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    limit: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def lanes(self) -> int:
        return len(self.seconds)

    @property
    def actions(self) -> int:
        return sum(self.count)

    @property
    def chunks(self) -> int:
        """The most stages that a rank has."""
        return max(map(len, self.placement.by_rank))

    @property
    def work_seconds(self) -> tuple[float, ...]:
        """How long each rank computes."""
        spent = [seconds * count for seconds, count in zip(self.seconds, self.count, strict=True)]
        return tuple(sum(sum(spent[3 * s : 3 * s + 3]) for s in stages) for stages in self.placement.by_rank)

    def rank_of(self, lane: int) -> int:
        return self.placement.rank_of[lane // 3]

    def with_microbatches(self, microbatches: int) -> Problem:
        """Return the same problem for another number of microbatches."""
        return replace(self, microbatches=microbatches, count=_counts(self.placement, microbatches))

    def schedule(self, name: str, rows: Rows) -> Schedule:
        """Return the schedule that runs these rows."""
        schedule_rows = []
        first = [self.placement.microbatches_of(stage, self.microbatches).start for stage in range(self.stages)]
        for row in rows:
            counts = [0] * self.lanes
            columns = array("i"), array("b"), array("i")
            for lane in row:
                stage = lane // 3
                columns[0].append(stage)
                columns[1].append(OPS[lane % 3].code)
                columns[2].append(first[stage] + counts[lane])
                counts[lane] += 1
            schedule_rows.append(Row.from_columns(*columns))
        return Schedule(name, self.placement, self.microbatches, schedule_rows)

    def rows(self, schedule: Schedule) -> Rows | None:
        """Return the rows of a schedule of F, I and W; None if it has other actions, or microbatches that do not
        ascend."""
        if not all(set(row.op) <= _INDEX_BY_CODE.keys() for row in schedule.rows):
            return None
        rows = [lanes_in_row(row) for row in schedule.rows]
        for row, lanes in zip(schedule.rows, rows, strict=True):
            latest: dict[int, int] = {}
            for lane, k in zip(lanes, row.microbatch, strict=True):
                if k <= latest.get(lane, -1):
                    return None
                latest[lane] = k
        return rows


def lanes_in_row(row: Row) -> list[int]:
    """Return the lane of each action of a row of F, I and W."""
    return [3 * stage + _INDEX_BY_CODE[op] for stage, op in zip(row.stage, row.op, strict=True)]


def problem(
    placement: Placement,
    microbatches: int,
    costs: StageCost | Sequence[StageCost],
    links: Links = NO_COST,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
) -> Problem:
    """Build the problem from the arguments of `search`. Raise the same ArgumentError."""
    check_counts(microbatches=microbatches)
    if objective not in get_args(Objective):
        raise ArgumentError(f"objective={objective!r}: expected one of {', '.join(get_args(Objective))}")
    by_stage = [cost for cost in costs_by_stage(placement, costs) if isinstance(cost, StageCost)]
    if len(by_stage) < placement.stages:
        raise ArgumentError(
            "a stage's costs differ by microbatch, but the search takes one for each stage; pass their mean"
        )
    need, lag, feeds = _messages(placement, by_stage, links)
    kept = tuple(float(cost.weight_gradient_bytes) for cost in by_stage)
    # Limits are kept when forwards are admitted, so what I leaves for W counts from F on, if it is more.
    held = tuple(max(float(cost.activation_bytes), part) for cost, part in zip(by_stage, kept, strict=True))
    if not any(held):  # nothing is known about memory, so activations are counted
        held = kept = (1.0,) * len(held)
    times = ((c.forward_seconds, c.backward_input_seconds, c.backward_weight_seconds) for c in by_stage)
    return Problem(
        placement,
        microbatches,
        objective,
        tuple(float(seconds) for triple in times for seconds in triple),
        need,
        lag,
        feeds,
        _counts(placement, microbatches),
        held,
        kept,
        _limits(placement, held, memory_limit),
    )


def _messages(
    placement: Placement, costs: Sequence[StageCost], links: Links
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
    """Return (need, lag, feeds) of each lane."""
    lanes = 3 * placement.stages
    need, lag, feeds = [-1] * lanes, [0.0] * lanes, [-1] * lanes
    for stage in range(placement.stages):
        if placement.is_last(stage):
            continue
        below, above = 3 * stage, 3 * stage + 3
        for source, target in ((below, above), (above + 1, below + 1)):
            need[target], feeds[source] = source, target
            ranks = placement.rank_of[source // 3], placement.rank_of[target // 3]
            if ranks[0] == ranks[1]:
                continue
            lag[target] = cost_between(links, *ranks).seconds(costs[stage].output_bytes)
    return tuple(need), tuple(lag), tuple(feeds)


def _limits(
    placement: Placement, held: Sequence[float], memory_limit: float | Sequence[float] | None
) -> tuple[float, ...]:
    if memory_limit is None:
        return (math.inf,) * placement.ranks
    values = [memory_limit] * placement.ranks if isinstance(memory_limit, int | float) else memory_limit
    if not all(isinstance(limit, int | float) for limit in values):  # a str has none either
        raise ArgumentError(f"memory_limit={memory_limit!r}: expected a number, or one for each rank")
    limits = [float(limit) for limit in values]
    if len(limits) != placement.ranks:
        raise ArgumentError(f"{len(limits)} memory limits for {placement.ranks} ranks; pass one, or one for each rank")
    for rank, limit in enumerate(limits):
        if math.isnan(limit):
            raise ArgumentError(f"the memory limit of rank {rank} is not a number; leave it out where there is none")
        for pipeline in range(placement.pipelines):
            stages = [s for s in placement.stages_on(rank) if placement.pipeline_of(s) == pipeline]
            required = sum(held[stage] for stage in stages)
            if required > limit * (1 + _SLACK):
                raise ArgumentError(
                    f"memory limit {limit:g} of rank {rank}: a single microbatch holds {required:g} on its "
                    f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}; raise "
                    "the limit to that or more"
                )
    return tuple(limit * (1 + _SLACK) for limit in limits)


def _counts(placement: Placement, microbatches: int) -> tuple[int, ...]:
    return tuple(len(placement.microbatches_of(lane // 3, microbatches)) for lane in range(3 * placement.stages))
