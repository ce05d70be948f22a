"""Times below which no step can be, from numbers alone: no schedule is made, let alone simulated.

A rank begins after the forwards of the stages before its lowest, does its work, and is followed by the backwards of
those stages; a stage's gradients are summed over replicas after its last backward. Whatever the order, none of this
can be saved. Messages, and waiting in between, only add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.balance import UnitCost
from penstock.schedule import Placement
from penstock.simulate import StageCost


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a schedule before it is made.

    Attributes:
        placement: of its stages.
        microbatches: over all copies of the model.
        splits: whether a weight gradient may come after the input gradient has left.
    """

    placement: Placement
    microbatches: int
    splits: bool

    def times(self, stage: int) -> int:
        """How many microbatches go through a stage."""
        return len(self.placement.microbatches_of(stage, self.microbatches))


def least_seconds(shape: Shape, costs: Sequence[StageCost], sums: Sequence[float]) -> float:
    """No order of these actions is faster.

    Args:
        costs: of each stage, copies included.
        sums: the seconds that summing each stage's gradients over replicas takes, copies included.
    """
    depth = shape.placement.depth
    forwards = [0.0, *accumulate(cost.forward_seconds for cost in costs)]
    backwards = [0.0, *accumulate(_on_the_way(cost, shape) for cost in costs)]
    last = [cost.backward_weight_seconds if shape.splits else 0.0 for cost in costs]  # of a copy's first stage
    least = 0.0
    for stages in shape.placement.by_rank:
        pairs = [(stage, stage - stage % depth) for stage in stages]
        before = min(forwards[stage] - forwards[first] for stage, first in pairs)
        after = min(backwards[stage] - backwards[first] + last[first] + sums[first] for stage, first in pairs)
        work = sum(shape.times(s) * (costs[s].forward_seconds + costs[s].backward_seconds) for s in stages)
        passed = sum(shape.times(s) * (costs[s].forward_seconds + _on_the_way(costs[s], shape)) for s in stages)
        least = max(least, before + work + min(sums[stage] for stage in stages), before + passed + after)
    return least


def least_seconds_anyhow(shape: Shape, units: Sequence[UnitCost], speeds: Sequence[float]) -> float:
    """No order of the actions of any cut is faster.

    A microbatch takes its whole way. And of the ranks, some need at least the mean. If each has one stage, the one
    after stages of P seconds waits for these and then works for m times its own; all of them end together at the
    earliest if each is (T - P) / m, so that T is the whole divided by 1 - (1 - 1/m)^p.

    Args:
        speeds: of each rank's device.
    """
    placement, count, fastest = shape.placement, shape.microbatches, max(speeds)
    whole = sum(unit.seconds for unit in units)
    passed = sum(unit.forward_seconds + unit.input_gradient_seconds for unit in units)
    on_the_way = passed if shape.splits else whole
    least = max(count * whole / sum(speeds), on_the_way / fastest)
    if placement.stages == placement.ranks:
        least = max(least, on_the_way / fastest / (1 - (1 - 1 / count) ** placement.ranks))
    return least


def _on_the_way(cost: StageCost, shape: Shape) -> float:
    """What a gradient waits for at a stage before it goes on."""
    return cost.backward_input_seconds if shape.splits else cost.backward_seconds
