"""What is said to a switch and by it, a line of JSON each: orders on its standard input, answers on its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from penstock.network.impairment import Bursts, Chance, Impairment
from penstock.network.link import Link
from penstock.network.topology import Topology


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
            own = {str(host): asdict(link) for host, link in topology.own.items()}
            given |= {"link": asdict(topology.link), "own": own, "seed": topology.seed}
        return json.dumps(given) + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """What `line` wrote."""
        given = json.loads(line)
        topology = None
        if "link" in given:
            own = {int(host): _link(fields) for host, fields in given["own"].items()}
            topology = Topology(_link(given["link"]), own, given["seed"])
        gone, background = given["gone"], given["background"]
        return cls(
            topology,
            None if gone is None else tuple(gone),
            None if background is None else tuple(background),
            given["tells"],
        )


def _link(fields: Mapping[str, Any]) -> Link:
    """Of what `asdict` made of it. Its text would not do: a link can be made, or changed, without one."""
    down = fields["down"]
    return Link(
        **{**fields, "impairment": _impairment(fields["impairment"]), "down": None if down is None else _link(down)}
    )


def _impairment(fields: Mapping[str, Any]) -> Impairment:
    chances = {name: _chance(value) for name, value in fields.items() if isinstance(value, dict)}
    return Impairment(**{**fields, **chances})


def _chance(fields: Mapping[str, Any]) -> Chance | Bursts:
    return Bursts(**fields) if "to_bad" in fields else Chance(**fields)


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
