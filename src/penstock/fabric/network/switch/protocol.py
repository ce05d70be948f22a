"""What is said to a switch and by it, a line of JSON each: orders on its standard input, answers on its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.fabric.network.parse import parse_link
from penstock.fabric.network.topology import Topology


@dataclass(frozen=True, slots=True)
class Order:
    """One line to a switch.

    Attributes:
        topology: what holds from now on; None: as before.
        gone: hosts that nothing comes from or gets to from now on; None: as before.
        background: neighbours' traffic from now on, as texts (background.py); None: as before.
        tells: what was counted so far is asked for.
    """

    topology: Topology | None = None
    gone: tuple[int, ...] | None = None
    background: tuple[str, ...] | None = None
    tells: bool = False

    def line(self) -> str:
        """As it is sent."""
        topology = self.topology
        given: dict[str, Any] = {"gone": self.gone, "background": self.background, "tells": self.tells}
        if topology is not None:
            own = {str(host): link.text for host, link in topology.own.items()}
            given |= {"link": topology.link.text, "own": own, "seed": topology.seed, "mtu": topology.mtu}
        return json.dumps(given) + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """What `line` wrote."""
        given = json.loads(line)
        topology = None
        if "link" in given:
            own = {int(host): parse_link(text) for host, text in given["own"].items()}
            topology = Topology(parse_link(given["link"]), own, given["seed"]).with_mtu(given["mtu"])
        gone, background = given["gone"], given["background"]
        return cls(
            topology,
            None if gone is None else tuple(gone),
            None if background is None else tuple(background),
            given["tells"],
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """The first line to a switch.

    Attributes:
        namespaces: files of the hosts' namespaces, by host.
        interface: the device's name in each.
        order: the network that it begins with.
    """

    namespaces: tuple[str, ...]
    interface: str
    order: Order = field(default_factory=Order)

    def line(self) -> str:
        """As it is sent."""
        return json.dumps({"namespaces": self.namespaces, "interface": self.interface}) + "\n" + self.order.line()

    @classmethod
    def read(cls, first: str, second: str) -> Self:
        """What `line` wrote, two lines."""
        given: Mapping[str, Any] = json.loads(first)
        return cls(tuple(given["namespaces"]), given["interface"], Order.read(second))
