"""What would fit if nothing does: the smallest change of each kind, tried before it is told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock._base.errors import ArgumentError
from penstock.costs import tied_bytes_overcount
from penstock.costs.sizes import Sizes
from penstock.plan.cluster import Cluster
from penstock.plan.options import FixedNumbers, ParallelConfig
from penstock.plan.plan import Plan
from penstock.plan.planner import open_candidates
from penstock.simulate.costs import LinkCost

MAX_TIMES = 8
"""So many times the devices are tried, at most."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a plan fits.

    Attributes:
        memory_bytes: what each device of each kind would have, if that is the change.
        devices: how many there would be, if that is the change.
        offload: whether the change is to offload activations to the host.
        plan: that fits then.
    """

    plan: Plan
    memory_bytes: tuple[float, ...] = ()
    devices: int = 0
    offload: bool = False


def remedies(
    sizes: Sizes, cluster: Cluster, global_batch: int, wanted: FixedNumbers, nearest: Plan
) -> Iterator[Remedy]:
    """More memory, in whole MiB; more devices, if all are of one kind; offloading, if it is not allowed. A change that
    would not help, or not be found soon, is left out.

    Args:
        nearest: the plan that lacks least.
    """
    needed = [kind.memory_bytes for kind in cluster.kinds]
    for row in nearest.grid:
        for device, need in zip(row, nearest.memory_bytes[: nearest.choice.ranks], strict=True):
            of = cluster.kind_of[device]
            needed[of] = max(needed[of], math.ceil(need / MIB) * MIB)
    kinds = (replace(kind, memory_bytes=size) for kind, size in zip(cluster.kinds, needed, strict=True))
    larger = replace(cluster, memory_bytes=math.inf, kinds=tuple(kinds))
    if (plan := first_that_fits(sizes, larger, global_batch, wanted, nearest.choice)) is not None:
        yield Remedy(plan, memory_bytes=tuple(kind.memory_bytes for kind in larger.kinds))
    units, limit = next(iter(sizes.profiles.values())).units, cluster.kinds[0].memory_bytes
    if len(cluster.kinds) == 1 and max(unit.held_bytes for unit in units) <= limit:  # each unit fits on some device
        held = sum(unit.held_bytes for unit in units) - sum(tied_bytes_overcount(units))
        least = max(cluster.devices + 1, math.ceil(held / limit))
        for more in range(least, MAX_TIMES * cluster.devices + 1):
            kind = replace(cluster.kinds[0], devices=more)
            wider = replace(cluster, devices=0, memory_bytes=math.inf, kinds=(kind,))
            if (plan := first_that_fits(sizes, wider, global_batch, wanted)) is not None:
                yield Remedy(plan, devices=more)
                break
    if cluster.offload_link is None:
        free = replace(cluster, memory_bytes=math.inf, offload_link=LinkCost(0.0))
        if (plan := first_that_fits(sizes, free, global_batch, wanted)) is not None:
            yield Remedy(plan, offload=True)


def first_that_fits(
    sizes: Sizes, cluster: Cluster, global_batch: int, wanted: FixedNumbers, likely: ParallelConfig | None = None
) -> Plan | None:
    """Return some plan that fits; None if there is none. A likely configuration is tried first, then small microbatches
    and many ranks."""
    try:
        candidates = [*open_candidates(sizes, cluster, global_batch, wanted)]
    except ArgumentError:
        return None
    order = sorted(candidates, key=lambda one: (one.choice.rows, -one.choice.ranks, one.at_least))
    for one in sorted(order, key=lambda one: one.choice != likely):
        if not one.where.may_hold(one.choice.placement):
            continue
        plan, _ = one.best()
        if not plan.lacking_bytes:
            return plan
    return None
