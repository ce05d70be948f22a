"""Options for the hosts' network: links, background traffic, slow hosts, changes over time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock._base.errors import ArgumentError
from penstock.cli._errors import flag
from penstock.cli._options import options_on

if TYPE_CHECKING:
    from penstock.network.machines import Machines
    from penstock.network.scenario import Event


network_option = options_on("The hosts' network")


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The network; None if an option was omitted."""

    link: str | None = network_option(
        'Link from each host to the switch, as for tc: "100mbit", "1gbit delay 5ms 1ms distribution pareto loss '
        '0.1% reorder 0.01% stall 2s every 60s", "up 10mbit down 100mbit". Delay and loss are one way between two '
        "hosts. Jitter keeps frames in order, which delays them under load; with overtaking it does not.",
        metavar="LINK",
    )
    link_for: list[str] | None = network_option(
        'Link of one host: "2=100mbit delay 20ms". Repeatable.', metavar="HOST=LINK"
    )
    background: list[str] | None = network_option(
        'Background traffic: "50mbit to 1", "incast 1mb every 100ms", "trace FILE". Repeatable.', metavar="TRAFFIC"
    )
    slow: list[str] | None = network_option(
        'Limit a host\'s processes to a share of one core: "2=25%". Repeatable, or comma-separated.',
        metavar="HOST=SHARE",
    )
    scenario: Path | None = network_option("Changes over time: a TOML file of events, see the guide.", metavar="FILE")
    shaper: Literal["auto", "tbf", "switch"] | None = network_option(
        "Implementation of the links: tbf, or a switch in user space. Default: the simplest sufficient one."
    )
    link_seed: int | None = network_option("Seed of the links' random draws; default 0.")

    def given(self) -> list[str]:
        """Return the options that were passed."""
        return [flag(option.name) for option in fields(self) if getattr(self, option.name) not in (None, [])]

    def machines(self, hosts: int) -> tuple[Machines, tuple[Event, ...]]:
        """Return the hosts, which `with` creates, and the events of the scenario."""
        from penstock.network.cpu_limit import parse_slow
        from penstock.network.machines import Machines
        from penstock.network.parse import parse_link
        from penstock.network.scenario import read_scenario
        from penstock.network.topology import Topology, parse_host_links

        slow = parse_slow(self.slow or (), hosts)
        if self.link is None:
            if unused := [option for option in self.given() if option not in ("--link", "--slow")]:
                raise ArgumentError(
                    f"{unused[0]} needs --link: without it links are not limited; pass --link 1gbit, for example"
                )
            return Machines(hosts, slow=slow), ()
        topology = Topology(parse_link(self.link), parse_host_links(self.link_for or (), hosts), self.link_seed or 0)
        events = () if self.scenario is None else read_scenario(self.scenario, topology, hosts)
        options: dict[str, Any] = {"background": self.background or (), "slow": slow, "changes": bool(events)}
        return Machines(hosts, topology, shaper=self.shaper or "auto", **options), events
