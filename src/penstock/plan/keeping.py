"""What each stage does with its activations between forward and backward: keeps them, makes them again, or sends them
to the host; and how much memory each rank then needs, with the batch, gradients, and what runs.

That depends on the order of a rank's actions, not on their times, and on no other rank's choice, unless the two hold
copies of one stage. So each rank's choice is the one that fits with the least extra work, found by trying all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain, product
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from penstock.costs import UnitCost, kept_bytes, tied_bytes_overcount
from penstock.schedule import Action, Op, Placement, Row, Schedule, stages_with_backward
from penstock.schedule.activations import offload_trips, recomputed_microbatches
from penstock.simulate import StageCost
from penstock.simulate.computations import IS_COMPUTE, column
from penstock.simulate.costs import LinkCost, StageCosts
from penstock.simulate.memory_use import allocation_table

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transient:
    """Bytes of a stage, or of a rank.

    The first backward of a step makes the gradients of parameters, since an optimizer's `zero_grad` drops them. Each is
    made while what was kept for it goes.

    Attributes:
        working: what a forward or a backward takes while it runs, at most, gradients of parameters apart.
        batch: the model's inputs and the loss's target: of a stage, for one microbatch; of a rank, for the whole step,
            since all are there from its beginning.
        first_backward: what a stage's first backward takes, these gradients included, if it is not split.
        first_inputs, first_weights: the same of the first I, and of the first W.
        early_bytes: of the gradients that I makes already: of parameters whose gradient cannot wait.
    """

    working: float
    batch: float
    first_backward: float = 0.0
    first_inputs: float = 0.0
    first_weights: float = 0.0
    early_bytes: float = 0.0

    @classmethod
    def of(cls, units: Sequence[UnitCost], *, splits: bool = False) -> Transient:
        """Sum up consecutive units as one stage: while one runs, the later ones keep nothing of this microbatch, except
        what W needs if backwards are split."""
        kept = kept_bytes(units)
        waiting = [unit.waiting_bytes if splits else 0.0 for unit in units]
        gradients = [unit.gradient_bytes for unit in units]
        early = [0 if unit.weight_gradient_bytes else size for unit, size in zip(units, gradients, strict=True)]
        each = [
            before + unit.working_bytes + later - kept[-1]
            for before, unit, later in zip(kept, units, _from_each(waiting)[1:], strict=True)
        ]
        working = max(0.0, *each)
        whole, inputs = (max(0.0, *map(add, each, _from_each(made))) for made in (gradients, early))
        # W goes from the first unit to the last, and frees what waits as it goes
        made, gone = accumulate(map(sub, gradients, early)), accumulate(waiting, initial=0.0)
        weights = working + max(0.0, *map(sub, made, gone))
        batch = sum(unit.input_bytes + unit.target_bytes for unit in units)
        return cls(working, batch, whole, inputs, weights, sum(early))


def _from_each(sizes: Sequence[float]) -> list[float]:
    """Return the sum from each element on, and 0 at the end."""
    return [*accumulate(reversed(sizes), initial=0.0)][::-1]


def transient_of_ranks(placement: Placement, microbatches: int, stages: Sequence[Transient]) -> list[Transient]:
    """Return the transient memory of each rank, which runs one computation at a time. `stages`: of one copy."""
    depth, found = placement.depth, []
    for own in placement.by_rank:
        batch = sum(stages[stage % depth].batch * len(placement.microbatches_of(stage, microbatches)) for stage in own)
        found.append(Transient(max(stages[stage % depth].working for stage in own), batch))
    return found


def held_again(placement: Placement, pieces: Sequence[Sequence[UnitCost]]) -> list[float]:
    """Return the bytes that the stages of each rank count more than once together, since tied parameters are there
    once. `pieces`: the units of each stage of one copy."""
    depth, found = placement.depth, []
    for own in placement.by_rank:
        numbers = dict.fromkeys(stage // depth for stage in own)
        copies = [[pieces[stage % depth] for stage in own if stage // depth == number] for number in numbers]
        together = sum(sum(tied_bytes_overcount(chain(*each))) for each in copies)
        found.append(together - sum(sum(tied_bytes_overcount(piece)) for each in copies for piece in each))
    return found


def kept_peaks(schedule: Schedule, costs: Sequence[StageCost], transient: Sequence[Transient]) -> list[float]:
    """Return the memory of each rank if every stage keeps its activations, without the batch. `costs`, `transient`: of
    each stage of one copy."""
    place, found = schedule.placement, []
    every = [(cost,) for cost in costs] * place.pipelines
    changes = allocation_table(every, stages_with_backward(schedule))[0, ..., 0]
    for row, stages in zip(schedule.rows, place.by_rank, strict=True):
        op, stage = _computations(row)
        taken, freed = changes[:, op, stage]
        kept = np.cumsum(taken) - np.cumsum(freed) + freed
        own = [costs[stage % place.depth] for stage in stages]
        held = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in own)
        found.append(held + float((kept + running(row, costs, transient)).max(initial=0.0)))
    return found


def running(row: Row, costs: Sequence[StageCost], transient: Sequence[Transient]) -> Floats:
    """Return the gradients of a rank's parameters, from each stage's first backward on, and the transient memory of the
    running computation. An optimizer drops gradients before each step: `zero_grad` does by default."""
    op, stage = _computations(row)
    found = np.array([one.working for one in transient])[stage % len(costs)]
    gradients = np.zeros(len(op))
    for number in np.unique(stage).tolist():
        backward = np.flatnonzero((stage == number) & (op != Op.F.code))
        if not len(backward):
            continue
        own, size = transient[number % len(costs)], costs[number % len(costs)].gradient_bytes
        weights = backward[op[backward] == Op.W.code]
        if op[backward[0]] == Op.B.code or not len(weights):
            found[backward[0]] = own.first_backward
            gradients[backward[0] + 1 :] += size
        else:
            found[backward[0]], found[weights[0]] = own.first_inputs, own.first_weights
            gradients[backward[0] + 1 :] += own.early_bytes
            gradients[weights[0] + 1 :] += size - own.early_bytes
    return np.asarray(found + gradients)


def _computations(row: Row) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    op = column(row.op)
    chosen = IS_COMPUTE[op]
    return op[chosen], column(row.stage)[chosen]


MAX_WAYS = 4096
"""Of a rank's stages; with more, all of them do the same."""


class Way(Enum):
    """What a stage does with activations."""

    KEEPS = "keeps"
    RECOMPUTES = "recomputes"
    OFFLOADS = "offloads"


@dataclass(frozen=True, slots=True)
class Demand:
    """What stages need, if every one keeps its activations.

    Attributes:
        costs: of each stage of one copy.
        input_bytes: what each receives for a microbatch: all that a recomputed one keeps.
        host: to the host's memory and back; None: nothing is offloaded.
        limits: what each rank has.
        again_seconds: what each takes to run its forward again, if it is recomputed.
        transient: what each takes while it runs.
    """

    costs: Sequence[StageCost]
    input_bytes: Sequence[float]
    host: LinkCost | None
    limits: Sequence[float]
    again_seconds: Sequence[float]
    transient: Sequence[Transient]


@dataclass(frozen=True)
class Keeping:
    """The ways of a schedule's stages.

    Attributes:
        ways: of each stage of one copy.
        peak_bytes: what each rank needs at most, all told.
        costs: of each stage, copies included.
    """

    ways: tuple[Way, ...]
    peak_bytes: tuple[float, ...]
    costs: tuple[StageCosts, ...]


def best_keeping(schedule: Schedule, demand: Demand) -> Keeping:
    """Choose for each rank the policy that fits with the least extra work; if none fits, the one with the smallest
    shortfall."""
    place = schedule.placement
    ways = dict.fromkeys(range(place.depth), Way.KEEPS)
    peaks = dict(enumerate(kept_peaks(schedule, demand.costs, demand.transient)))
    costs: dict[int, StageCosts] = dict(enumerate([*demand.costs] * place.pipelines))
    for ranks in _together(schedule):
        if any(peaks[rank] > demand.limits[rank] for rank in ranks):
            by_stage, needed, made = _best(schedule, demand, ranks)
            ways |= by_stage
            peaks |= needed
            for stage, cost in made.items():
                # One for each microbatch of the schedule: a copy of the model has only some.
                each = () if isinstance(cost, StageCost) else tuple(cost)
                costs[stage] = (*each, *(each[-1:] * (schedule.microbatches - len(each)))) if each else cost
    return Keeping(tuple(ways.values()), tuple(peaks.values()), tuple(costs.values()))


def _best(
    schedule: Schedule, demand: Demand, ranks: Sequence[int]
) -> tuple[dict[int, Way], dict[int, float], dict[int, StageCosts]]:
    """Choose for ranks that hold copies of the same stages, usually a single rank: return the policy of each stage of
    one copy, what each rank then needs, and what each stage costs."""
    depth = schedule.placement.depth
    on_rank = {rank: schedule.placement.stages_on(rank) for rank in ranks}
    stages = sorted({stage % depth for own in on_rank.values() for stage in own})
    open_ways = [way for way in Way if demand.host is not None or way is not Way.OFFLOADS]
    done: dict[tuple[int, Way], _Done] = {}
    always: dict[int, tuple[float, Floats]] = {}
    for rank, own in on_rank.items():
        costs = [demand.costs[stage % depth] for stage in own]
        beside = running(schedule.rows[rank], demand.costs, demand.transient)
        always[rank] = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in costs), beside
        work = tuple(action for action in schedule.rows[rank] if action.op.is_compute)
        for stage, way in product(own, open_ways):
            done[stage, way] = _Done.of(way, work, stage, demand)
    found = []
    many = len(open_ways) ** len(stages) > MAX_WAYS
    every = product(open_ways, repeat=len(stages))  # keeping everything first
    for chosen in [(way,) * len(stages) for way in open_ways] if many else every:
        by_stage = dict(zip(stages, chosen, strict=True))
        each = {rank: [done[stage, by_stage[stage % depth]] for stage in own] for rank, own in on_rank.items()}
        needed = {}
        for rank, (constant, beside) in always.items():
            course = np.sum([one.held for one in each[rank]], axis=0) + beside
            needed[rank] = constant + float(course.max(initial=0.0))
        lacks = lacking([*needed.values()], [demand.limits[rank] for rank in ranks])
        extra = sum(one.extra_seconds for of_rank in each.values() for one in of_rank)
        found.append(((lacks, extra, sum(way is not Way.KEEPS for way in chosen)), by_stage, needed))
    _, by_stage, needed = min(found, key=lambda one: one[0])
    made = {stage: done[stage, by_stage[stage % depth]].cost for own in on_rank.values() for stage in own}
    return by_stage, needed, made


@dataclass(frozen=True, slots=True)
class _Done:
    """A stage of a rank that goes one way.

    Attributes:
        held: the bytes that are there during each of the rank's actions.
        cost: what it costs; one for each microbatch (copies count on) if they may differ.
        extra_seconds: what the way adds to the rank's work.
    """

    held: Floats
    cost: StageCosts
    extra_seconds: float

    @classmethod
    def of(cls, way: Way, work: Sequence[Action], stage: int, demand: Demand) -> _Done:
        depth = len(demand.costs)
        cost, received = demand.costs[stage % depth], demand.input_bytes[stage % depth]
        again = demand.again_seconds[stage % depth]
        trip = 0.0 if demand.host is None else demand.host.seconds(cost.activation_bytes)
        places = _places(work, stage)
        other = frozenset[int]()  # the microbatches that run again, or that are away for long enough
        if way is not Way.KEEPS:
            runs = way is Way.RECOMPUTES
            other = (
                recomputed_microbatches(lambda _: (), work, stage) if runs else offload_trips(work, stage).for_backward
            )
        each, change = [cost] * (max(places, default=-1) + 1), np.zeros(len(work) + 2)

        def hold(first: int, last: int, amount: float) -> None:
            change[first] += amount
            change[last + 1] -= amount

        def stall(place: int) -> float:
            """Return by how much a copy takes longer than the computation beside which it travels."""
            beside = work[place]
            return max(0.0, trip - demand.costs[beside.stage % depth].seconds(beside.op))

        for number, (forward, backward, end) in places.items():
            if number not in other:
                hold(forward, backward, cost.activation_bytes)
            elif way is Way.RECOMPUTES:
                hold(forward, end, received)
                hold(forward, forward, cost.activation_bytes)
                hold(backward, backward, cost.activation_bytes)
                each[number] = replace(cost, backward_input_seconds=cost.backward_input_seconds + again)
            else:
                hold(forward, forward + 1, cost.activation_bytes)
                hold(backward - 1, backward, cost.activation_bytes)
                longer, back = cost.forward_seconds + stall(forward + 1), stall(backward - 1)
                each[number] = replace(
                    cost, forward_seconds=longer, backward_input_seconds=cost.backward_input_seconds + back
                )
            if end > backward:
                hold(backward + 1, end, cost.weight_gradient_bytes)
        own = (each[number] for number in places) if other else ()
        extra = sum(
            one.forward_seconds - cost.forward_seconds + one.backward_seconds - cost.backward_seconds for one in own
        )
        return cls(np.cumsum(change)[: len(work)], cost if way is Way.KEEPS else each, extra)


def _places(work: Sequence[Action], stage: int) -> dict[int, tuple[int, int, int]]:
    """Return where in a rank's row each microbatch of a stage has its forward, its backward (B or I) and its end (B or
    W); without a backward, the forward ends it."""
    found: dict[int, list[int]] = {}
    for place, action in enumerate(work):
        if action.stage == stage and action.microbatch is not None:
            found.setdefault(action.microbatch, []).append(place)
    return {number: (places[0], places[min(1, len(places) - 1)], places[-1]) for number, places in found.items()}


def _together(schedule: Schedule) -> list[list[int]]:
    """Group the ranks so that no two groups share a stage, not even copies of one."""
    place = schedule.placement
    groups: list[tuple[set[int], set[int]]] = []
    for rank, stages in enumerate(place.by_rank):
        own = {stage % place.depth for stage in stages}
        met = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        groups.append(({rank}.union(*(g[0] for g in met)), own.union(*(g[1] for g in met))))
    return [sorted(ranks) for ranks, _ in groups]


def lacking(peak_bytes: Sequence[float], limits: Sequence[float]) -> float:
    """Return the largest shortfall of a rank; 0 if all fit."""
    return max((max(0.0, peak - limit) for peak, limit in zip(peak_bytes, limits, strict=True)), default=math.inf)
