"""What would fit if nothing does: the smallest change of each kind, verified by a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock._base.errors import ArgumentError
from penstock.costs import tied_bytes_overcount
from penstock.costs.sizes import Sizes
from penstock.plan.cluster import Cluster
from penstock.plan.configs import FixedNumbers, ParallelConfig
from penstock.plan.plan import Plan
from penstock.plan.planner import enumerate_candidates
from penstock.simulate.costs import LinkCost

MAX_DEVICE_FACTOR = 8
"""Up to this many times the devices are tried."""

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


def remedies(sizes: Sizes, cluster: Cluster, global_batch: int, fixed: FixedNumbers, closest: Plan) -> Iterator[Remedy]:
    """More memory, in whole MiB; more devices, if all are of one kind; offloading, if it is not allowed. A change that
    would not help, or not be found soon, is left out.

    Args:
        closest: the plan that lacks least.
    """
    pool_bytes = [kind.memory_bytes for kind in cluster.kinds]
    for row in closest.grid:
        for device, peak in zip(row, closest.memory_bytes[: closest.choice.ranks], strict=True):
            pool = cluster.kind_of[device]
            pool_bytes[pool] = max(pool_bytes[pool], math.ceil(peak / MIB) * MIB)
    kinds = (replace(kind, memory_bytes=size) for kind, size in zip(cluster.kinds, pool_bytes, strict=True))
    larger = replace(cluster, memory_bytes=math.inf, kinds=tuple(kinds))
    if (plan := first_that_fits(sizes, larger, global_batch, fixed, closest.choice)) is not None:
        yield Remedy(plan, memory_bytes=tuple(kind.memory_bytes for kind in larger.kinds))
    units, limit = next(iter(sizes.profiles.values())).units, cluster.kinds[0].memory_bytes
    if len(cluster.kinds) == 1 and max(unit.held_bytes for unit in units) <= limit:  # each unit fits on some device
        static_bytes = sum(unit.held_bytes for unit in units) - sum(tied_bytes_overcount(units))
        min_devices = max(cluster.devices + 1, math.ceil(static_bytes / limit))
        for devices in range(min_devices, MAX_DEVICE_FACTOR * cluster.devices + 1):
            kind = replace(cluster.kinds[0], devices=devices)
            wider = replace(cluster, devices=0, memory_bytes=math.inf, kinds=(kind,))
            if (plan := first_that_fits(sizes, wider, global_batch, fixed)) is not None:
                yield Remedy(plan, devices=devices)
                break
    if cluster.offload_link is None:
        offloading = replace(cluster, memory_bytes=math.inf, offload_link=LinkCost(0.0))
        if (plan := first_that_fits(sizes, offloading, global_batch, fixed)) is not None:
            yield Remedy(plan, offload=True)


def first_that_fits(
    sizes: Sizes, cluster: Cluster, global_batch: int, fixed: FixedNumbers, hint: ParallelConfig | None = None
) -> Plan | None:
    """Return some plan that fits; None if there is none. A hint is tried first, then small microbatches
    and many ranks."""
    try:
        candidates = [*enumerate_candidates(sizes, cluster, global_batch, fixed)]
    except ArgumentError:
        return None
    ordered = sorted(candidates, key=lambda c: (c.choice.rows, -c.choice.ranks, c.lower_bound))
    for candidate in sorted(ordered, key=lambda c: c.choice != hint):
        if not candidate.cut.may_hold(candidate.choice.placement):
            continue
        plan, _ = candidate.best()
        if not plan.lacking_bytes:
            return plan
    return None
