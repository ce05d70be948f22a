"""Which device runs which rank of which replica: so that least goes over the links between hosts.

Devices of several kinds are placed first: ranks of one kind follow each other, and the replicas of a rank are alike if
the numbers allow. Within that, the hosts are chosen. Up to `MAX_EXACT_DEVICES` all are considered; beyond that, hosts
are rectangles of so many replicas by so many consecutive ranks, and each shape is considered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from penstock.plan.cluster import Cluster
from penstock.simulate.costs import LinkCost

MAX_EXACT_DEVICES = 8
"""With more devices there are too many assignments to try all."""

Grid = NDArray[np.intp]
"""A number for each replica and rank, [replica, rank]."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of one step.

    Attributes:
        messages: between two ranks of a pipeline, a < b, both ways together.
        gradients: of each rank, which its replicas sum.
    """

    messages: Mapping[tuple[int, int], float]
    gradients: Sequence[float]


def assign_pools(cluster: Cluster, replicas: int, ranks: int) -> list[Grid]:
    """Return the device pools that run each rank of each replica: one assignment for each order of the pools."""
    grids: dict[bytes, Grid] = {}
    for order in permutations(range(len(cluster.kinds))):
        kinds = [kind for kind in order for _ in range(cluster.kinds[kind].devices)]
        grid = np.array(kinds, dtype=np.intp).reshape(ranks, replicas).T.copy()
        grids.setdefault(grid.tobytes(), grid)
    return list(grids.values())


def inter_host_bytes(hosts: Grid, traffic: Traffic) -> float:
    """Return the bytes per step over links between hosts.

    The replicas of a rank sum its gradients in a ring, which leaves each of its hosts once.
    """
    replicas = len(hosts)
    total = sum(float((hosts[:, a] != hosts[:, b]).sum()) * size for (a, b), size in traffic.messages.items())
    if replicas > 1:
        shares = 2 * (replicas - 1) / replicas * np.asarray(traffic.gradients)
        ordered = np.sort(hosts, axis=0)
        crossings = 1 + (ordered[1:] != ordered[:-1]).sum(axis=0)
        total += float((np.where(crossings > 1, crossings, 0) * shares).sum())
    return total


def assign_devices(cluster: Cluster, kinds: Grid, traffic: Traffic) -> Grid:
    """Assign a device to each rank of each replica. Of assignments that are equally good, return the first in order.

    Args:
        kinds: which kind each must be of, from `assign_pools`.
    """
    grids = [_fill(cluster, kinds, order) for order in _fill_orders(cluster, *kinds.shape)]
    if cluster.hosts == 1:
        return grids[0]
    best, exact = (
        min(candidates, key=lambda grid: inter_host_bytes(_hosts(cluster, grid), traffic), default=grids[0])
        for candidates in (grids, _enumerate_grids(cluster, kinds) if cluster.devices <= MAX_EXACT_DEVICES else ())
    )
    best_bytes, exact_bytes = (inter_host_bytes(_hosts(cluster, grid), traffic) for grid in (best, exact))
    return exact if exact_bytes < best_bytes * (1 - 1e-12) else best


def links_between(cluster: Cluster, devices: Grid, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], LinkCost]:
    """Return the slowest link of any replica between two ranks, both ways."""
    hosts, links = _hosts(cluster, devices), {}
    for a, b in pairs:
        differs = hosts[:, a] != hosts[:, b]
        used = [cluster.between(crosses=crosses) for crosses in {bool(value) for value in differs}]
        link = LinkCost.slowest(used)
        links[a, b] = links[b, a] = link
    return links


def rings_cross_hosts(cluster: Cluster, devices: Grid) -> list[bool]:
    """Return, for each rank, whether its replicas are on several hosts."""
    hosts = _hosts(cluster, devices)
    return [bool(crosses) for crosses in (hosts != hosts[0]).any(axis=0)]


def _hosts(cluster: Cluster, devices: Grid) -> Grid:
    return devices // (cluster.devices_per_host or cluster.devices)


def _fill_orders(cluster: Cluster, replicas: int, ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Orders in which positions are filled with devices: replica by replica first, then other rectangles."""
    size = cluster.devices_per_host or cluster.devices
    shapes = [(1, ranks), (replicas, 1)]
    shapes += [
        (a, size // a) for a in range(1, size + 1) if not size % a and not replicas % a and not ranks % (size // a)
    ]
    for height, width in dict.fromkeys(shapes):
        yield [
            (replica, rank)
            for top in range(0, replicas, height)
            for left in range(0, ranks, width)
            for replica in range(top, top + height)
            for rank in range(left, left + width)
        ]


def _fill(cluster: Cluster, kinds: Grid, order: Sequence[tuple[int, int]]) -> Grid:
    """Give each position the next device of its pool."""
    kind_of = cluster.kind_of
    free = [iter([device for device, kind in enumerate(kind_of) if kind == pool]) for pool in range(len(cluster.kinds))]
    grid = np.empty_like(kinds)
    for position in order:
        grid[position] = next(free[kinds[position]])
    return grid


def _enumerate_grids(cluster: Cluster, kinds: Grid) -> Iterator[Grid]:
    """Yield all assignments, except those that differ only in devices of a pool on one host, or in hosts that are
    alike."""
    kind_of, grid = cluster.kind_of, np.empty_like(kinds)
    hosts: list[int] = _hosts(cluster, np.arange(cluster.devices)).tolist()
    on_host: dict[int, list[int]] = {}
    for host, kind in zip(hosts, kind_of, strict=True):
        on_host.setdefault(host, []).append(kind)

    def extend(index: int, free: frozenset[int]) -> Iterator[Grid]:
        if index == grid.size:
            yield grid.copy()
        seen = set[object]()
        used_hosts = {hosts[device] for device in grid.flat[:index]}
        for device in sorted(free):
            host = hosts[device]
            host_key = host if host in used_hosts else tuple(on_host[host])
            if kind_of[device] == kinds.flat[index] and host_key not in seen:
                seen.add(host_key)
                grid.flat[index] = device
                yield from extend(index + 1, free - {device})

    return extend(0, frozenset(range(cluster.devices)))
