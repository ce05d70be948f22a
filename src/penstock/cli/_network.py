"""The options that say what joins hosts that are made of this machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import ArgumentError

if TYPE_CHECKING:
    from penstock.fabric.network.machines import Machines

_PANEL = "Over a network"


def _option(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=_PANEL, **more)


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Hosts, and what joins them. None: not given."""

    hosts: Annotated[
        int | None,
        _option("Spreads the ranks evenly over so many hosts, network namespaces of this machine (Linux, as root)."),
    ] = None
    link: Annotated[
        str | None,
        _option('What joins each host to the others, as for tc: "100mbit delay 5ms loss 1%".', metavar="TEXT"),
    ] = None
    link_of: Annotated[
        list[str] | None, _option('Of one host alone: "2=20mbit delay 40ms". Repeatable.', metavar="HOST=TEXT")
    ] = None
    link_seed: Annotated[int | None, _option("Of all that is drawn for the links; 0 if nothing is said.")] = None
    shaper: Annotated[
        str | None, _option("What shapes the links: auto, tbf, netem or switch; auto if nothing is said.")
    ] = None
    background: Annotated[
        list[str] | None, _option('Neighbours\' traffic on the links: "50mbit to 1". Repeatable.', metavar="TEXT")
    ] = None

    def machines(self) -> Machines | None:
        """The hosts, to be made by `with`; None where none are asked for.

        Raises:
            ArgumentError: an option is wrong, or has no meaning without another.
            FabricError: this machine cannot make hosts.
        """
        if self.hosts is None:
            self._refuse_all("--hosts: without it ranks are processes of this machine, and no link joins them")
            return None
        from penstock.fabric.network.machines import Machines
        from penstock.fabric.network.parse import parse_link
        from penstock.fabric.network.shapers import AUTO
        from penstock.fabric.network.topology import Topology, parse_own

        topology = None
        if self.link is None:
            self._refuse_all("--link: without it hosts are joined as fast as the machine can", "hosts")
        else:
            topology = Topology(parse_link(self.link), parse_own(self.link_of or (), self.hosts), self.link_seed or 0)
        return Machines(self.hosts, topology, shaper=self.shaper or AUTO, background=self.background or ())

    def _refuse_all(self, needed: str, *but: str) -> None:
        for given in fields(self):
            if given.name not in but and getattr(self, given.name) not in (None, []):
                raise ArgumentError(f"--{given.name.replace('_', '-')} needs {needed}")
