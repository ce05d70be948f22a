"""The devices that a job runs on, and what their collectives take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock._base.errors import ArgumentError
from penstock.costs.hardware import USUAL, Cable, Device, Efficiency
from penstock.plan.transformer.operations import Grid
from penstock.simulate import LinkCost

LINK_FRACTION = NETWORK_FRACTION = 0.8
"""Of a cable's rate, what large collectives reach: round figures. (nccl-tests on eight A100: 230 of 300 GB/s.)"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hosts of equal devices.

    Attributes:
        device: each of them.
        efficiency: how much of its peaks is reached.
        link_fraction, network_fraction: how much of the rates of links within hosts, and between them.
        devices_per_host: how many a host has.

    Raises:
        ArgumentError: a fraction is not above 0 and at most 1.
    """

    device: Device
    efficiency: Efficiency = USUAL
    link_fraction: float = LINK_FRACTION
    network_fraction: float = NETWORK_FRACTION
    devices_per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("link_fraction", "network_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: expected a fraction, above 0 and at most 1")

    @property
    def grid(self) -> Grid:
        """How products are divided among the device's processors."""
        return Grid(self.device.processors)

    @property
    def link(self) -> LinkCost:
        """Between devices of a host, at the rate that is reached. Raises ArgumentError if there is none."""
        return self._reached(self.device.link, "within a host", self.link_fraction)

    @property
    def network(self) -> LinkCost:
        """Between devices of two hosts, a device's share, at the rate that is reached. Raises as `link` does."""
        return self._reached(self.device.network, "between hosts", self.network_fraction)

    def all_reduce_seconds(self, size: float, devices: int, *, stride: int = 1) -> float:
        """A sum of tensors of that many bytes over neighbors, or every stride-th device.

        Rings within hosts and, if the group has more of them, between hosts: there, a host's members together have
        their ports, of which each of the stride groups on the host uses its own.
        """
        if devices == 1:
            return 0.0
        inside = min(devices, max(1, self.devices_per_host // stride))
        if inside == devices:
            return _ring(size, devices, self.link)
        return max(
            _ring(size, inside, self.link) if inside > 1 else 0.0,
            _ring(size, devices, self.network, inside),
        )

    def _reached(self, cable: Cable | None, where: str, fraction: float) -> LinkCost:
        if cable is None:
            raise ArgumentError(f"device {self.device.key!r}: nothing is known of what joins two of them {where}")
        return LinkCost(cable.latency_seconds, cable.bytes_per_second * fraction)


def _ring(size: float, devices: int, link: LinkCost, ports: int = 1) -> float:
    rounds = 2 * math.ceil(math.log2(devices))  # latencies as of a tree, which libraries use where latencies count
    return rounds * link.latency_seconds + 2 * (devices - 1) / devices * size / (link.bytes_per_second * ports)
