"""What a rank holds during each of its computations, and what it takes besides while they run.

A rank computes one thing after the other, so their order decides, not times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from penstock.costs import UnitCost, counted_again, kept_bytes
from penstock.schedule import Op, Placement, Row, Schedule
from penstock.simulate import StageCost
from penstock.simulate.columns import IS_COMPUTE, column

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class First:
    """What a stage takes while it makes the gradients of its parameters: in the first backward of a step, since an
    optimizer's `zero_grad` drops them. Each is made while what was kept for it goes.

    Attributes:
        whole: what the first backward takes while it runs, these gradients included, if it is not split.
        inputs, weights: the same of the first I, and of the first W.
        early_bytes: of the gradients that I makes already: of parameters whose gradient cannot wait.
    """

    whole: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    early_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Besides:
    """Bytes of a stage, or of a rank.

    Attributes:
        working: what a forward or a backward takes while it runs, at most, gradients of parameters apart.
        batch: the model's inputs and the loss's target: of a stage, for one microbatch; of a rank, for the whole step,
            since all are there from its beginning.
        first: the same as `working` of its first backward, in which gradients of parameters are made.
    """

    working: float
    batch: float
    first: First = First()

    @classmethod
    def of(cls, units: Sequence[UnitCost], *, splits: bool = False) -> Besides:
        """Those of consecutive units as one stage: while one runs, the later ones keep nothing of this microbatch, but
        for what W needs, if backwards are split.
        """
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
        made = accumulate(map(sub, gradients, early))
        gone = accumulate(waiting, initial=0.0)
        first = First(whole, inputs, working + max(0.0, *map(sub, made, gone)), sum(early))
        return cls(working, sum(unit.input_bytes + unit.target_bytes for unit in units), first)


def _from_each(sizes: Sequence[float]) -> list[float]:
    """The sum from each on, and 0 behind the last."""
    return [*accumulate(reversed(sizes), initial=0.0)][::-1]


def besides(placement: Placement, microbatches: int, stages: Sequence[Besides]) -> list[Besides]:
    """Those of each rank, which computes one thing at a time. `stages`: of one copy."""
    depth, found = placement.depth, []
    for own in placement.by_rank:
        batch = sum(stages[stage % depth].batch * len(placement.microbatches_of(stage, microbatches)) for stage in own)
        found.append(Besides(max(stages[stage % depth].working for stage in own), batch))
    return found


def held_again(placement: Placement, pieces: Sequence[Sequence[UnitCost]]) -> list[float]:
    """What the stages of each rank hold too much together, since what is tied is there once. `pieces`: the units of
    each stage of one copy.
    """
    found = []
    for own in placement.by_rank:
        copies: dict[int, list[Sequence[UnitCost]]] = {}
        for stage in own:
            copies.setdefault(stage // placement.depth, []).append(pieces[stage % placement.depth])
        together = (sum(counted_again(unit for piece in each for unit in piece)) for each in copies.values())
        alone = (sum(counted_again(piece)) for each in copies.values() for piece in each)
        found.append(sum(together) - sum(alone))
    return found


def kept_peaks(schedule: Schedule, costs: Sequence[StageCost], besides: Sequence[Besides]) -> list[float]:
    """What each rank needs if every stage keeps its activations, without the batch. `costs`, `besides`: of each stage
    of one copy.
    """
    place, found = schedule.placement, []
    for row, stages in zip(schedule.rows, place.by_rank, strict=True):
        own = [costs[stage % place.depth] for stage in stages]
        held = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in own)
        found.append(held + float((kept(row, costs) + running(row, costs, besides)).max(initial=0.0)))
    return found


def kept(row: Row, costs: Sequence[StageCost]) -> Floats:
    """What microbatches keep on a rank during each of its computations."""
    op, stage = _computations(row)
    place = stage % len(costs)
    size, late = (
        np.array([getattr(cost, name) for cost in costs])[place]
        for name in ("activation_bytes", "weight_gradient_bytes")
    )
    forward, ends = op == Op.F.code, np.isin(stage, stage[op != Op.F.code])
    comes = np.where(forward, size, 0.0)
    goes = np.select([forward, op == Op.B.code, op == Op.I.code], [np.where(ends, 0.0, size), size, size - late], late)
    return np.asarray(np.cumsum(comes) - np.cumsum(goes) + goes)


def running(row: Row, costs: Sequence[StageCost], besides: Sequence[Besides]) -> Floats:
    """The gradients of a rank's parameters, from each stage's first backward on, and what a computation takes while it
    runs. An optimizer drops gradients before each step: `zero_grad` does, unless it is told to keep them.
    """
    op, stage = _computations(row)
    place = stage % len(costs)
    found = np.array([one.working for one in besides])[place]
    gradients = np.zeros(len(op))
    for own in np.unique(stage).tolist():
        backward = np.flatnonzero((stage == own) & (op != Op.F.code))
        if not len(backward):
            continue
        first, size = besides[own % len(costs)].first, costs[own % len(costs)].gradient_bytes
        weights = backward[op[backward] == Op.W.code]
        if op[backward[0]] == Op.B.code or not len(weights):
            found[backward[0]] = first.whole
            gradients[backward[0] + 1 :] += size
        else:
            found[backward[0]], found[weights[0]] = first.inputs, first.weights
            gradients[backward[0] + 1 :] += first.early_bytes
            gradients[weights[0] + 1 :] += size - first.early_bytes
    return np.asarray(found + gradients)


def _computations(row: Row) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    op = column(row.op)
    chosen = IS_COMPUTE[op]
    return op[chosen], column(row.stage)[chosen]
