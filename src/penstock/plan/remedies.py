"""What would fit if nothing does: the smallest change of each kind, verified by a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from penstock._base.errors import ArgumentError
from penstock.costs import tied_bytes_overcount
from penstock.costs.links import USUAL_LINK
from penstock.costs.sizes import Sizes
from penstock.plan.cluster import Cluster
from penstock.plan.parallel_configs import FixedNumbers, ParallelConfig
from penstock.plan.plan import Plan
from penstock.plan.planner import enumerate_candidates

MAX_DEVICE_FACTOR = 8
"""Up to this many times the devices are tried."""

MIB = 2**20


def remedies(
    sizes: Sizes, cluster: Cluster, global_batch: int, fixed: FixedNumbers, closest: Plan, group: int = 1
) -> Iterator[tuple[str, Plan]]:
    """Yield options, each with a plan that fits: more memory, in whole MiB; more devices, if all are of one kind;
    offloading, if it is not allowed. A change that would not help, or not be found soon, is left out.

    Args:
        closest: the plan that lacks least.
        group: how many devices each of the cluster's stands for.
    """
    pool_bytes = [kind.memory_bytes for kind in cluster.kinds]
    for row in closest.grid:
        for device, peak in zip(row, closest.memory_bytes[: closest.choice.ranks], strict=True):
            pool = cluster.kind_of[device]
            pool_bytes[pool] = max(pool_bytes[pool], math.ceil(peak / MIB) * MIB)
    kinds = tuple(replace(kind, memory_bytes=size) for kind, size in zip(cluster.kinds, pool_bytes, strict=True))
    larger = replace(cluster, memory_bytes=math.inf, kinds=kinds)
    if (plan := first_that_fits(sizes, larger, global_batch, fixed, closest.choice)) is not None:
        texts = [f"{size / MIB:.0f}MiB" if size < math.inf else "" for size in pool_bytes]
        named = [f"{kind.name}={text}" for kind, text in zip(kinds, texts, strict=True)]
        yield f"--memory {','.join(named if len(kinds) > 1 else texts)}", plan
    units, limit = next(iter(sizes.profiles.values())).units, cluster.kinds[0].memory_bytes
    if len(cluster.kinds) == 1 and max(unit.held_bytes for unit in units) <= limit:  # each unit fits on some device
        static_bytes = sum(unit.held_bytes for unit in units) - sum(tied_bytes_overcount(units))
        min_devices = max(cluster.devices + 1, math.ceil(static_bytes / limit))
        for devices in range(min_devices, MAX_DEVICE_FACTOR * cluster.devices + 1):
            kind = replace(cluster.kinds[0], devices=devices)
            wider = replace(cluster, devices=0, memory_bytes=math.inf, kinds=(kind,))
            if (plan := first_that_fits(sizes, wider, global_batch, fixed)) is not None:
                yield f"--devices {devices * group}", plan
                break
    if cluster.offload_link is None:
        offloading = replace(cluster, memory_bytes=math.inf, offload_link=USUAL_LINK)
        if (plan := first_that_fits(sizes, offloading, global_batch, fixed)) is not None:
            rate = f"{8e-9 * USUAL_LINK.bytes_per_second:g}gbit delay {1e6 * USUAL_LINK.latency_seconds:g}us"
            yield f'--offload-link "{rate}" (PCIe 4.0, 16 lanes per device)', plan


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
