"""How much memory each rank needs over time: a constant part, activations, and gathered parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schedule import Op, Row, Schedule, stages_with_backward
from penstock.schedule.timeline import Timeline, Track
from penstock.simulate.computations import IS_COMPUTE, Floats, Ints, column
from penstock.simulate.costs import StageCost, StageCosts, costs_by_microbatch


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank by kind, in the unit of the costs (bytes).

    Attributes:
        parameters, gradients, optimizer: of all its stages, all the time.
        seconds: when the rest changes.
        activations: their size from then until the next change.
        unsharded: the same for the whole parameters of sharded stages that are gathered, or about to be.
    """

    parameters: float
    gradients: float
    optimizer: float
    seconds: tuple[float, ...]
    activations: tuple[float, ...]
    unsharded: tuple[float, ...]

    @property
    def peak_activations(self) -> float:
        return max(self.activations, default=0.0)

    @property
    def peak_unsharded(self) -> float:
        return max(self.unsharded, default=0.0)

    @property
    def peak(self) -> float:
        """The most that the rank needs at once."""
        coming_and_going = max(map(sum, zip(self.activations, self.unsharded, strict=True)), default=0.0)
        return self.parameters + self.gradients + self.optimizer + coming_and_going


def memory(schedule: Schedule, costs: StageCost | Sequence[StageCosts], timeline: Timeline) -> list[Memory]:
    """Return the memory of each rank over the timeline.

    A microbatch's `activation_bytes` are held from the start of its F to the end of its B; if the backward is split,
    `weight_gradient_bytes` take their place at the end of I, and are freed at the end of W. On a stage without a
    backward they are freed at the end of F. `unsharded_bytes` are held from the start of each UNSHARD to the end of the
    next RESHARD; in a simulation, these take place when the computation before them ends.

    Args:
        schedule: the one that the timeline shows.
        costs: as for `simulate`.
        timeline: simulated or real.

    Raises:
        ArgumentError: not one cost for each stage.
    """
    return [
        Memory(*static, *(tuple(column.tolist()) for column in usage))
        for static, usage in _usage_by_rank(schedule, costs, timeline)
    ]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a rank needs of each kind, and at once, in the unit of the costs (bytes)."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    unsharded: float
    at_once: float


def peaks(schedule: Schedule, costs: StageCost | Sequence[StageCosts], timeline: Timeline) -> list[Peaks]:
    """Return the peaks of `memory`, whose columns may take more room than the schedule and the timeline themselves.

    Args and errors as for `memory`.
    """
    rank_peaks = []
    for static, (_, activations, unsharded) in _usage_by_rank(schedule, costs, timeline):
        columns = activations, unsharded, activations + unsharded
        peak_activations, peak_unsharded, peak_total = (float(column.max(initial=0)) for column in columns)
        rank_peaks.append(Peaks(*static, peak_activations, peak_unsharded, sum(static) + peak_total))
    return rank_peaks


_Static = tuple[float, float, float]
"""What a rank holds all the time: parameters, gradients and the optimizer's state."""


def _usage_by_rank(
    schedule: Schedule, costs: StageCost | Sequence[StageCosts], timeline: Timeline
) -> Iterator[tuple[_Static, tuple[Floats, Floats, Floats]]]:
    """Yield, for each rank, its static memory and the last three columns of `Memory`."""
    by_stage = costs_by_microbatch(schedule, costs)
    table = allocation_table(by_stage, stages_with_backward(schedule))
    for stages, row, track in zip(schedule.placement.by_rank, schedule.rows, timeline.tracks, strict=False):
        stage_costs = [by_stage[stage][0] for stage in stages]
        static = (
            sum(cost.parameter_bytes for cost in stage_costs),
            sum(cost.gradient_bytes for cost in stage_costs),
            sum(cost.optimizer_bytes for cost in stage_costs),
        )
        yield static, _usage(table, *_with_gathers(row, track))


def allocation_table(costs: Sequence[Sequence[StageCost]], with_backward: frozenset[int]) -> Floats:
    """Return what actions allocate at their start and free at their end: by kind of memory, start or end, op, stage and
    microbatch.

    What I frees may be negative. `with_backward`: the stages that keep activations for a backward.
    """
    table = np.zeros((2, 2, len(Op), len(costs), max(map(len, costs))))
    for stage, stage_costs in enumerate(costs):
        activations, unsharded = table[:, :, :, stage]
        activation = np.array([cost.activation_bytes for cost in stage_costs])
        weight_gradient = np.array([cost.weight_gradient_bytes for cost in stage_costs])
        activations[0, Op.F.code] = activation
        activations[1, Op.F.code] = 0 if stage in with_backward else activation
        activations[1, Op.B.code] = activation
        activations[1, Op.I.code] = activation - weight_gradient
        activations[1, Op.W.code] = weight_gradient
        unsharded[0, Op.UNSHARD.code] = unsharded[1, Op.RESHARD.code] = stage_costs[0].unsharded_bytes
    return table


def memory_after_actions(schedule: Schedule, activations: Sequence[int], static: Sequence[int]) -> list[list[int]]:
    """Return what each rank holds after each of its actions, as `memory` counts it.

    Args:
        schedule: as it runs, communication included.
        activations: for each stage, what a microbatch keeps from forward to backward.
        static: for each stage, what it holds all the time.
    """
    costs = [StageCost(0, 0, 0, activation_bytes=size, weight_gradient_bytes=size) for size in activations]
    held = zip(schedule.placement.by_rank, activations_by_action(schedule, costs), strict=True)
    static_bytes = ((sum(static[stage % len(static)] for stage in stages), after) for stages, (_, after) in held)
    return [(size + after).astype(int).tolist() for size, after in static_bytes]


def activations_by_action(schedule: Schedule, costs: Sequence[StageCost]) -> Iterator[tuple[Floats, Floats]]:
    """Yield, for each rank, what activations take during each of its actions, and after it. `costs`: of each stage of
    one copy."""
    by_stage = [(cost,) for cost in costs] * schedule.placement.pipelines
    table = allocation_table(by_stage, stages_with_backward(schedule))[0, ..., 0]
    for row in schedule.rows:
        allocated, freed = table[:, column(row.op), column(row.stage)]
        after = np.cumsum(allocated - freed)
        yield after + freed, after


_GATHERS = (Op.UNSHARD.code, Op.RESHARD.code)


def _with_gathers(row: Row, track: Track) -> tuple[Ints, Ints, Ints, Floats, Floats]:
    """Return the ops, stages, microbatches, starts and ends of a track, with the row's gathers if a simulation left
    these out."""
    actions = track.actions
    op, stage, number = column(actions.op), column(actions.stage), column(actions.microbatch)
    start, end = column(track.start), column(track.end)
    codes, stages = column(row.op), column(row.stage)
    gathers = np.flatnonzero(np.isin(codes, _GATHERS)) if any(code in _GATHERS for _, code in row.kinds) else ()
    if not len(gathers) or any(code in _GATHERS for _, code in track.actions.kinds):
        return op, stage, number, start, end
    positions = np.cumsum(IS_COMPUTE[codes])[gathers]  # how many computations come before
    times = np.concatenate([[0.0], end])[positions]
    inserted = (codes[gathers], stages[gathers], np.full(len(gathers), -1), times, times)
    columns = zip((op, stage, number, start, end), inserted, strict=True)
    op, stage, number, start, end = (np.insert(values_before, positions, values) for values_before, values in columns)
    return op, stage, number, start, end


def _usage(
    table: Floats, op: Ints, stage: Ints, number: Ints, start: Floats, end: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return when memory changes, and to what, by kind. A rank runs one action after another, so its nodes are in order
    of time."""
    index = (op, stage, number if table.shape[-1] > 1 else 0)  # what gathers take is the same for every number
    times, changes = np.empty(2 * len(op)), np.zeros((len(table), 2 * len(op)))
    times[::2], times[1::2] = start, end
    for change, (allocated, freed) in zip(changes, table, strict=True):
        if allocated.any() or freed.any():
            change[::2], change[1::2] = allocated[index], -freed[index]
    changed = changes.any(axis=0)
    if not changed.all():
        times, changes = times[changed], changes[:, changed]
    activations, unsharded = np.cumsum(changes, axis=1)
    return times, activations, unsharded
