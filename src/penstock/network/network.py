"""A complete network specification: links, what shapes them, neighbors, throttled hosts, and changes over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.network.machines import Machines
from penstock.network.scenario import Event
from penstock.network.shapers import AUTO
from penstock.network.topology import Topology


@dataclass(frozen=True, slots=True)
class Network:
    """A requested network, parsed and checked; none of it exists yet.

    Attributes:
        hosts: the number of hosts.
        topology: their links; None for links as fast as the machine can make them.
        shaper: what is to shape them, one of `shapers.SHAPERS`.
        background: neighbors' traffic, as texts (background.py).
        slow: throttled hosts, and their shares of one core.
        events: the scenario's events.
    """

    hosts: int
    topology: Topology | None = None
    shaper: str = AUTO
    background: tuple[str, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def machines(self) -> Machines:
        """Returns the hosts, which are created by `with`. Raises ArgumentError: as `Machines` does."""
        return Machines(
            self.hosts,
            self.topology,
            shaper=self.shaper,
            background=self.background,
            slow=self.slow,
            changes=bool(self.events),
        )
