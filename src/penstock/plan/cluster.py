"""The devices to plan for, and what a message between two of them costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError, check_seconds
from penstock._base.formatting import pluralize
from penstock.simulate.costs import NO_COST, LinkCost


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Devices that are alike.

    Attributes:
        name: for messages.
        devices: how many there are.
        memory_bytes: of each.
        speed: how fast it computes; 1: as fast as the device of the profile.

    Raises:
        ArgumentError: a number is not above 0.
    """

    name: str
    devices: int
    memory_bytes: float = math.inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        of = f" of {self.name!r}" if self.name else ""
        if self.devices < 1:
            raise ArgumentError(f"devices={self.devices}{of}: expected an integer >= 1")
        if not self.memory_bytes > 0:
            raise ArgumentError(f"memory_bytes={self.memory_bytes}{of}: expected the bytes of each device, > 0")
        if not 0 < self.speed < math.inf:
            raise ArgumentError(f"speed={self.speed}{of}: expected a number above 0; 1 is the profile's device")


@accept_old_names(between_hosts="inter_host_link", host_link="offload_link")
@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices on hosts of equal size. They have consecutive numbers, kind after kind and host after host.

    Attributes:
        devices: how many in all.
        memory_bytes: of each.
        link: between two devices of a host.
        devices_per_host: None: one host has them all.
        inter_host_link: between two devices of different hosts; None: as within a host.
        kinds: if not all devices are alike: `devices` and `memory_bytes` are then taken from these.
        offload_link: between a device and its host's memory; None: nothing is offloaded.
        action_seconds: what the runtime adds to each forward and each backward of a stage, on any device.
        optimizer_byte_seconds: what an optimizer's step takes per byte of its state, on a device of speed 1.

    Raises:
        ArgumentError: a number is less than one, or there is a link between hosts but one host.
    """

    devices: int = 0
    memory_bytes: float = math.inf
    link: LinkCost = NO_COST
    devices_per_host: int | None = None
    inter_host_link: LinkCost | None = None
    kinds: tuple[DevicePool, ...] = ()
    offload_link: LinkCost | None = None
    action_seconds: float = 0.0
    optimizer_byte_seconds: float = 0.0

    def __post_init__(self) -> None:
        kinds = self.kinds or (DevicePool("", self.devices, self.memory_bytes),)
        total = sum(kind.devices for kind in kinds)
        if self.kinds and self.devices not in (0, total):
            raise ArgumentError(f"devices={self.devices}, but kinds= has {total}; omit devices")
        if self.kinds and self.memory_bytes < math.inf:
            raise ArgumentError("memory_bytes= together with kinds=: set it in each kind")
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "devices", total)
        object.__setattr__(self, "memory_bytes", max(kind.memory_bytes for kind in kinds))
        check_seconds(action_seconds=self.action_seconds)
        if self.devices_per_host is not None and self.devices_per_host < 1:
            raise ArgumentError(
                f"devices_per_host={self.devices_per_host}: expected an integer >= 1, or None for one host"
            )
        if self.inter_host_link is not None and self.hosts == 1:
            raise ArgumentError(
                f"inter_host_link is set, but one host has all of {pluralize(self.devices, 'device')}: pass "
                "devices_per_host= too, or omit it"
            )

    @property
    def hosts(self) -> int:
        """How many hosts there are; the last may have fewer devices."""
        return 1 if self.devices_per_host is None else math.ceil(self.devices / self.devices_per_host)

    @property
    def kind_of(self) -> tuple[int, ...]:
        """The index of each device's kind."""
        return tuple(index for index, kind in enumerate(self.kinds) for _ in range(kind.devices))

    def ring_seconds(self, size_bytes: float, members: int, *, crosses: bool) -> float:
        """Return the seconds of a ring all-reduce of a buffer over its members: 2 (n - 1) messages, one after another.

        Args:
            crosses: whether they are on several hosts.
        """
        if members == 1 or not size_bytes:
            return 0.0
        return 2 * (members - 1) * self.between(crosses=crosses).seconds(size_bytes / members)

    def least_ring_seconds(self, size_bytes: float, members: int) -> float:
        """Return the same for the best location of the members."""
        return min(self.ring_seconds(size_bytes, members, crosses=crosses) for crosses in (False, True))

    def between(self, *, crosses: bool) -> LinkCost:
        """Return the link between two devices, of different hosts or of one."""
        return self.inter_host_link if crosses and self.inter_host_link is not None else self.link
