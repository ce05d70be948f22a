"""A better order of work than a named schedule's, for the same stages on the same ranks, by `penstock.search`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.balance import UnitCost
from penstock.errors import ArgumentError
from penstock.plan.cluster import Cluster
from penstock.plan.predict import Cut, besides_of, limits_of, links_of
from penstock.schedule import Schedule
from penstock.search import search

MOST_ACTIONS = 6000
"""Of an order worth searching: longer ones take minutes, and gain less."""


def searched(
    schedule: Schedule, units: Sequence[UnitCost], cluster: Cluster, where: Cut, seconds: float
) -> Schedule | None:
    """The best order found that keeps all activations within memory; None if a named schedule is as good.

    Args:
        schedule: whose placement and microbatches are kept.
    """
    placement = schedule.placement
    if 3 * placement.stages * schedule.microbatches > MOST_ACTIONS:
        return None
    room, (more, _, besides) = [], besides_of(schedule, units, where)
    for rank, limit in enumerate(limits_of(cluster, where.kinds)):
        own = [stage % placement.depth for stage in placement.stages_on(rank)]
        costs = [where.costs[stage] for stage in own]
        held = sum(c.parameter_bytes + c.gradient_bytes + c.optimizer_bytes for c in costs)
        running = max(
            max(besides[s].working, besides[s].first.inputs - besides[s].first.early_bytes) for s in own
        )  # in any order, with all gradients there
        room.append(limit - more[rank] - held - running)
    try:
        found = search(
            placement,
            schedule.microbatches,
            where.costs,
            links_of(schedule, units, cluster, where),
            memory_limit=None if min(room) == math.inf else room,
            objective="makespan",
            seconds=seconds,
        )
    except ArgumentError:  # a rank has no room for even one microbatch
        return None
    return found.schedule if found.schedule.name == "search" else None
