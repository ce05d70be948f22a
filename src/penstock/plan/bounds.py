"""Times below which no step can be, from numbers alone: no schedule is made, let alone simulated.

A rank begins after the forwards of the stages before its lowest, does its work, and is followed by the backwards of
those stages; a stage's gradients are summed over replicas after its last backward. Whatever the order, none of this
can be saved. Messages, and waiting in between, only add.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.costs import UnitCost
from penstock.plan.choice import Choice
from penstock.simulate import StageCost


def least_seconds(choice: Choice, costs: Sequence[StageCost], sums: Sequence[float]) -> float:
    """No order of these actions is faster.

    Args:
        choice: of which only what its schedule has before it is made counts.
        costs: of each stage, copies included.
        sums: the seconds that summing each stage's gradients over replicas takes, copies included.
    """
    placement, splits = choice.placement, choice.splits
    on_the_way = [cost.backward_input_seconds if splits else cost.backward_seconds for cost in costs]
    last = [cost.backward_weight_seconds if splits else 0.0 for cost in costs]  # of a copy's first stage
    forwards = [0.0, *accumulate(cost.forward_seconds for cost in costs)]
    backwards = [0.0, *accumulate(on_the_way)]
    times = [len(placement.microbatches_of(stage, choice.microbatches)) for stage in range(placement.stages)]
    least = 0.0
    for stages in placement.by_rank:
        pairs = [(stage, stage - stage % placement.depth) for stage in stages]
        before = min(forwards[stage] - forwards[first] for stage, first in pairs)
        after = min(backwards[stage] - backwards[first] + last[first] + sums[first] for stage, first in pairs)
        work = sum(times[s] * (costs[s].forward_seconds + costs[s].backward_seconds) for s in stages)
        passed = sum(times[s] * (costs[s].forward_seconds + on_the_way[s]) for s in stages)
        least = max(least, before + work + min(sums[stage] for stage in stages), before + passed + after)
    return least


def least_seconds_anyhow(choice: Choice, units: Sequence[UnitCost], speeds: Sequence[float]) -> float:
    """No order of the actions of any cut is faster.

    A microbatch takes its whole way. And of the ranks, some need at least the mean. If each has one stage, the one
    after stages of P seconds waits for these and then works for m times its own; all of them end together at the
    earliest if each is (T - P) / m, so that T is the whole divided by 1 - (1 - 1/m)^p.

    Args:
        speeds: of each rank's device.
    """
    placement, count, fastest = choice.placement, choice.microbatches, max(speeds)
    whole = sum(unit.seconds for unit in units)
    passed = sum(unit.forward_seconds + unit.input_gradient_seconds for unit in units)
    on_the_way = passed if choice.splits else whole
    least = max(count * whole / sum(speeds), on_the_way / fastest)
    if placement.stages == placement.ranks:
        least = max(least, on_the_way / fastest / (1 - (1 - 1 / count) ** placement.ranks))
    return least
