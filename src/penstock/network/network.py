"""A complete network specification: links, what shapes them, neighbours, throttled hosts, and what changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.network.machines import Machines
from penstock.network.scenario import Event
from penstock.network.shapers import AUTO
from penstock.network.topology import Topology


@dataclass(frozen=True, slots=True)
class Network:
    """The requested network, parsed and checked; nothing of it exists yet.

    Attributes:
        hosts: how many.
        topology: their links; None: as fast as the machine can.
        shaper: what is to shape them, one of `shapers.SHAPERS`.
        background: neighbours' traffic, as texts (background.py).
        slow: throttled hosts, and their shares of one core.
        events: of the scenario.
    """

    hosts: int
    topology: Topology | None = None
    shaper: str = AUTO
    background: tuple[str, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def machines(self) -> Machines:
        """The hosts, which `with` creates.

        Raises:
            ArgumentError: as `Machines` does.
        """
        return Machines(
            self.hosts,
            self.topology,
            shaper=self.shaper,
            background=self.background,
            slow=self.slow,
            changes=bool(self.events),
        )
