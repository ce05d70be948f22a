"""The links of a measured network, or those that a profile measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ArgumentError
from penstock.simulate.costs import LinkCost

if TYPE_CHECKING:
    from penstock.costs.profile import Profile

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
        found = self.pairs.get(ends, self.every)
        if found is None:
            raise KeyError(ends)
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def known(self) -> list[LinkCost]:
        return [*self.pairs.values(), *([self.every] if self.every else [])]

    def check(self, ranks: int, name: str) -> None:
        """Raises ArgumentError if there are fewer hosts than ranks and no cost for the other pairs."""
        hosts = max(map(max, self.pairs), default=-1) + 1
        if self.every is None and hosts < ranks:
            raise ArgumentError(
                f"{self.source} has links between {hosts} hosts, but {name} has {ranks} ranks: measure that many, or "
                f"add {ANY_PAIR} for pairs that were not measured"
            )


def links_in(profile: Profile, source: str) -> MeasuredLinks:
    """The links that a profile measured; every pair that it did not measure has the slowest of them."""
    from penstock.costs.stage_costs import link_cost, slowest_link

    pairs = {(link.source, link.target): link_cost(link) for link in profile.links}
    return MeasuredLinks(pairs, slowest_link(profile), source)
