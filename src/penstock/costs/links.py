"""What a message between two ranks costs: as a network's links or a profile's were measured, or as is usual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock._base.errors import ArgumentError
from penstock.simulate.costs import LinkCost

if TYPE_CHECKING:
    from penstock.costs.profile import MeasuredLink, Profile

ANY_PAIR = '"all": {"latency": 1e-4, "bandwidth": 1e8}'
"""For messages: how a links file gives a cost to every pair of ranks that it does not name."""


@dataclass(frozen=True, slots=True)
class MeasuredLinks(Mapping[tuple[int, int], LinkCost]):
    """The measured links between hosts. Host h is rank h.

    Attributes:
        pairs: link costs by (sending rank, receiving rank).
        every: the cost for every other pair; None: they have none.
        source: the file, for messages.
    """

    pairs: Mapping[tuple[int, int], LinkCost]
    every: LinkCost | None
    source: str

    def __getitem__(self, ends: tuple[int, int]) -> LinkCost:
        link = self.pairs.get(ends, self.every)
        if link is None:
            raise KeyError(ends)
        return link

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def known(self) -> list[LinkCost]:
        return [*self.pairs.values(), *([self.every] if self.every else [])]

    def check(self, ranks: int, name: str) -> None:
        """Raise ArgumentError if there are fewer hosts than ranks and no cost for the other pairs."""
        hosts = max(map(max, self.pairs), default=-1) + 1
        if self.every is None and hosts < ranks:
            raise ArgumentError(
                f"{self.source} has links between {hosts} hosts, but {name} has {ranks} ranks: measure that many, or "
                f"add {ANY_PAIR} for pairs that were not measured"
            )


USUAL_LINKS = {"cpu": LinkCost(30e-6, 5e9)}
"""Default links between ranks, by device type: the shared memory of one machine, ..."""

USUAL_LINK = LinkCost(10e-6, 25e9)
"""... and PCIe 4.0 with 16 lanes. Ranks of one process send nothing, but are cut like those of several."""


def usual_link(device: str) -> LinkCost:
    """Return the assumed cost of a message between two ranks of this `device` type."""
    return USUAL_LINKS.get(device, USUAL_LINK)


def describe_link(link: LinkCost) -> str:
    """Describe the costs assumed for links that were not measured."""
    return f"assuming {1e6 * link.latency_seconds:.4g} us latency and {link.bytes_per_second / 1e9:.4g} GB/s"


def slowest_link(profile: Profile) -> LinkCost | None:
    """Return a link with the longest latency and the least bandwidth of all measured ones; None if there are none."""
    return LinkCost.slowest([link_cost(link) for link in profile.links]) if profile.links else None


def link_cost(link: MeasuredLink) -> LinkCost:
    """Convert a measured link to the simulator's."""
    return LinkCost(link.latency_seconds, link.bytes_per_second or math.inf)


def link_for(profile: Profile) -> LinkCost:
    """Between any two ranks: the slowest link that the profile measured, or what is usual for its device."""
    return slowest_link(profile) or usual_link(profile.device)


def links_in(profile: Profile, source: str) -> MeasuredLinks:
    """Return the links that a profile measured; every pair that it did not measure has the slowest of them."""
    pairs = {(link.source, link.target): link_cost(link) for link in profile.links}
    return MeasuredLinks(pairs, slowest_link(profile), source)
