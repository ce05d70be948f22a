"""The devices to plan for, and what a message between two of them costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ArgumentError
from penstock.simulate.costs import NO_COST, LinkCost
from penstock.words import counted

Inner = Literal["pp", "dp"]
"""What a host's devices are: neighbours in a pipeline, or replicas of one rank."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind, on hosts of equal size.

    Attributes:
        devices: how many in all.
        memory_bytes: of each.
        link: between two devices of a host.
        devices_per_host: None: one host has them all.
        between_hosts: between two devices of different hosts; None: as within a host.

    Raises:
        ArgumentError: a number is less than one, or there is a link between hosts but one host.
    """

    devices: int
    memory_bytes: float = math.inf
    link: LinkCost = NO_COST
    devices_per_host: int | None = None
    between_hosts: LinkCost | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ArgumentError(f"devices={self.devices}: expected at least 1")
        if not self.memory_bytes > 0:
            raise ArgumentError(f"memory_bytes={self.memory_bytes}: expected what each device has, more than 0")
        if self.devices_per_host is not None and self.devices_per_host < 1:
            raise ArgumentError(f"devices_per_host={self.devices_per_host}: expected at least 1, or None for one host")
        if self.between_hosts is not None and self.hosts == 1:
            raise ArgumentError(
                f"between_hosts is given, but one host has all of {counted(self.devices, 'device')}: give "
                "devices_per_host= too, or leave it out"
            )

    @property
    def hosts(self) -> int:
        """How many hosts there are; the last may have fewer devices."""
        return 1 if self.devices_per_host is None else math.ceil(self.devices / self.devices_per_host)

    def pipeline_links(self, ranks: int, replicas: int, inner: Inner) -> dict[tuple[int, int], LinkCost]:
        """The slowest link that any replica has between each two ranks of a pipeline."""

        def between(a: int, b: int) -> LinkCost:
            ends = [[_device(end, r, ranks, replicas, inner) for end in (a, b)] for r in range(replicas)]
            return self._slowest([(one, other) for one, other in ends])

        return {(a, b): between(a, b) for a in range(ranks) for b in range(ranks) if a != b}

    def reduce_seconds(self, rank: int, ranks: int, replicas: int, inner: Inner, gradient_bytes: float) -> float:
        """What a ring takes to sum a rank's gradients over its replicas: 2 (dp - 1) messages, one after another."""
        if replicas == 1:
            return 0.0
        ring = [_device(rank, replica, ranks, replicas, inner) for replica in range(replicas)]
        slowest = self._slowest(list(zip(ring, [*ring[1:], ring[0]], strict=True)))
        return 2 * (replicas - 1) * slowest.seconds(gradient_bytes / replicas)

    def _slowest(self, pairs: list[tuple[int, int]]) -> LinkCost:
        far = self.between_hosts
        if far is None or self.devices_per_host is None:
            return self.link
        size = self.devices_per_host
        crosses = {a // size != b // size for a, b in pairs}
        used = [far if crossing else self.link for crossing in crosses]
        return LinkCost(max(link.latency_seconds for link in used), min(link.bytes_per_second for link in used))


def _device(rank: int, replica: int, ranks: int, replicas: int, inner: Inner) -> int:
    """The number of the device that has this rank of this replica; hosts have consecutive numbers."""
    return replica * ranks + rank if inner == "pp" else rank * replicas + replica
