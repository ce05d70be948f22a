"""A network that is asked for, whole: links, what shapes them, neighbours, hosts held back, and what changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.fabric.network.director import Played, playing
from penstock.fabric.network.machines import Machines
from penstock.fabric.network.scenario import Event
from penstock.fabric.network.shapers import AUTO
from penstock.fabric.network.topology import Topology


@dataclass(frozen=True, slots=True)
class Network:
    """What is asked for, read and checked; nothing of it is made yet.

    Attributes:
        hosts: how many.
        topology: their links; None: as fast as the machine can.
        shaper: what is to shape them, one of `shapers.SHAPERS`.
        background: neighbours' traffic, as texts (background.py).
        events: of the scenario.
    """

    hosts: int
    topology: Topology | None = None
    shaper: str = AUTO
    background: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    def machines(self) -> Machines:
        """The hosts, to be made by `with`.

        Raises:
            ArgumentError: as `Machines` does.
        """
        return Machines(
            self.hosts,
            self.topology,
            shaper=self.shaper,
            background=self.background,
            changes=bool(self.events),
        )

    @contextmanager
    def playing(self, machines: Machines, step: Callable[[], int]) -> Iterator[Played]:
        """Plays the scenario while the block runs; see `director.playing`."""
        with playing(machines, self.events, step) as played:
            yield played
