"""What a rank takes of memory besides what it holds and keeps: the batch, gradients, and what a computation takes while
it runs.

A rank computes one thing after the other, so their order decides, not times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from penstock.costs import UnitCost, counted_again, kept_bytes
from penstock.schedule import Op, Placement, Row, Schedule, stages_with_backward
from penstock.simulate import StageCost
from penstock.simulate.computations import IS_COMPUTE, column
from penstock.simulate.memory_use import changes_of

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
        made, gone = accumulate(map(sub, gradients, early)), accumulate(waiting, initial=0.0)
        weights = working + max(0.0, *map(sub, made, gone))
        batch = sum(unit.input_bytes + unit.target_bytes for unit in units)
        return cls(working, batch, whole, inputs, weights, sum(early))


def _from_each(sizes: Sequence[float]) -> list[float]:
    """The sum from each on, and 0 behind the last."""
    return [*accumulate(reversed(sizes), initial=0.0)][::-1]


def transient_of_ranks(placement: Placement, microbatches: int, stages: Sequence[Transient]) -> list[Transient]:
    """Those of each rank, which computes one thing at a time. `stages`: of one copy."""
    depth, found = placement.depth, []
    for own in placement.by_rank:
        batch = sum(stages[stage % depth].batch * len(placement.microbatches_of(stage, microbatches)) for stage in own)
        found.append(Transient(max(stages[stage % depth].working for stage in own), batch))
    return found


def held_again(placement: Placement, pieces: Sequence[Sequence[UnitCost]]) -> list[float]:
    """What the stages of each rank hold too much together, since what is tied is there once. `pieces`: the units of
    each stage of one copy.
    """
    depth, found = placement.depth, []
    for own in placement.by_rank:
        numbers = dict.fromkeys(stage // depth for stage in own)
        copies = [[pieces[stage % depth] for stage in own if stage // depth == number] for number in numbers]
        together = sum(sum(counted_again(chain(*each))) for each in copies)
        found.append(together - sum(sum(counted_again(piece)) for each in copies for piece in each))
    return found


def kept_peaks(schedule: Schedule, costs: Sequence[StageCost], transient: Sequence[Transient]) -> list[float]:
    """What each rank needs if every stage keeps its activations, without the batch. `costs`, `transient`: of each stage
    of one copy.
    """
    place, found = schedule.placement, []
    every = [(cost,) for cost in costs] * place.pipelines
    changes = changes_of(every, stages_with_backward(schedule))[0, ..., 0]
    for row, stages in zip(schedule.rows, place.by_rank, strict=True):
        op, stage = _computations(row)
        taken, freed = changes[:, op, stage]
        kept = np.cumsum(taken) - np.cumsum(freed) + freed
        own = [costs[stage % place.depth] for stage in stages]
        held = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in own)
        found.append(held + float((kept + running(row, costs, transient)).max(initial=0.0)))
    return found


def running(row: Row, costs: Sequence[StageCost], transient: Sequence[Transient]) -> Floats:
    """The gradients of a rank's parameters, from each stage's first backward on, and what a computation takes while it
    runs. An optimizer drops gradients before each step: `zero_grad` does, unless it is told to keep them.
    """
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
