"""Which device runs which rank of which replica: so that least goes over the links between hosts.

Devices of several kinds are placed first: ranks of one kind follow each other, and the replicas of a rank are alike if
the numbers allow. Within that, the hosts are chosen. Up to `EXACT` devices every way is considered; beyond that, hosts
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

EXACT = 8
"""With more devices there are too many ways."""

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


def kinds_of_ranks(cluster: Cluster, replicas: int, ranks: int) -> list[Grid]:
    """Return the device pools that run each rank of each replica: one assignment for each order of the pools."""
    ways: dict[bytes, Grid] = {}
    for order in permutations(range(len(cluster.kinds))):
        along = [kind for kind in order for _ in range(cluster.kinds[kind].devices)]
        grid = np.array(along, dtype=np.intp).reshape(ranks, replicas).T.copy()
        ways.setdefault(grid.tobytes(), grid)
    return list(ways.values())


def crossing_bytes(hosts: Grid, traffic: Traffic) -> float:
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


def arrange(cluster: Cluster, kinds: Grid, traffic: Traffic) -> Grid:
    """Assign a device to each rank of each replica. Of assignments that are equally good, return the first in order.

    Args:
        kinds: which kind each must be of, from `kinds_of_ranks`.
    """
    grids = [_filled(cluster, kinds, walk) for walk in _walks(cluster, *kinds.shape)]
    if cluster.hosts == 1:
        return grids[0]
    best, other = (
        min(some, key=lambda grid: crossing_bytes(_hosts(cluster, grid), traffic), default=grids[0])
        for some in (grids, _every(cluster, kinds) if cluster.devices <= EXACT else ())
    )
    least, found = (crossing_bytes(_hosts(cluster, grid), traffic) for grid in (best, other))
    return other if found < least * (1 - 1e-12) else best


def links_between(cluster: Cluster, devices: Grid, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], LinkCost]:
    """Return the slowest link of any replica between two ranks, both ways."""
    hosts, found = _hosts(cluster, devices), {}
    for a, b in pairs:
        apart = hosts[:, a] != hosts[:, b]
        used = [cluster.between(crosses=crosses) for crosses in {bool(one) for one in apart}]
        link = LinkCost.slowest(used)
        found[a, b] = found[b, a] = link
    return found


def crossed_rings(cluster: Cluster, devices: Grid) -> list[bool]:
    """Return, for each rank, whether its replicas are on several hosts."""
    hosts = _hosts(cluster, devices)
    return [bool(one) for one in (hosts != hosts[0]).any(axis=0)]


def _hosts(cluster: Cluster, devices: Grid) -> Grid:
    return devices // (cluster.devices_per_host or cluster.devices)


def _walks(cluster: Cluster, replicas: int, ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Orders in which positions are filled with devices: replica by replica first, then other rectangles."""
    size = cluster.devices_per_host or cluster.devices
    shapes = [(1, ranks), (replicas, 1)]
    shapes += [
        (a, size // a) for a in range(1, size + 1) if not size % a and not replicas % a and not ranks % (size // a)
    ]
    for high, wide in dict.fromkeys(shapes):
        yield [
            (replica, rank)
            for top in range(0, replicas, high)
            for left in range(0, ranks, wide)
            for replica in range(top, top + high)
            for rank in range(left, left + wide)
        ]


def _filled(cluster: Cluster, kinds: Grid, walk: Sequence[tuple[int, int]]) -> Grid:
    """Give each position the next device of its pool."""
    of = cluster.kind_of
    free = [iter([device for device, kind in enumerate(of) if kind == each]) for each in range(len(cluster.kinds))]
    grid = np.empty_like(kinds)
    for place in walk:
        grid[place] = next(free[kinds[place]])
    return grid


def _every(cluster: Cluster, kinds: Grid) -> Iterator[Grid]:
    """Yield all assignments, except those that differ only in devices of a pool on one host, or in hosts that are
    alike."""
    kind_of, grid = cluster.kind_of, np.empty_like(kinds)
    on_host: dict[int, list[int]] = {}
    for device, kind in enumerate(kind_of):
        on_host.setdefault(cluster.host_of(device), []).append(kind)

    def filled(place: int, free: frozenset[int]) -> Iterator[Grid]:
        if place == grid.size:
            yield grid.copy()
        seen = set[object]()
        touched = {cluster.host_of(int(device)) for device in grid.flat[:place]}
        for device in sorted(free):
            host = cluster.host_of(device)
            alike = host if host in touched else tuple(on_host[host])
            if kind_of[device] == kinds.flat[place] and alike not in seen:
                seen.add(alike)
                grid.flat[place] = device
                yield from filled(place + 1, free - {device})

    return filled(0, frozenset(range(cluster.devices)))
