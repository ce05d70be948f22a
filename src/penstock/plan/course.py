"""What a rank holds during each of its computations: it runs one after the other, so their order decides, not times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.plan.besides import Besides
from penstock.schedule import Op, Row, Schedule
from penstock.simulate import StageCost
from penstock.simulate.columns import IS_COMPUTE, column

Floats = NDArray[np.float64]


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
