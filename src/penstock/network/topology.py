"""A network of hosts around one switch: each host's link, and what affects a frame from one host to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.network.link import NOTHING, Impairment, Link
from penstock.network.parse import parse_link
from penstock.network.quantities import by_host


@dataclass(frozen=True, slots=True)
class Topology:
    """The links that join the hosts.

    Between two hosts with the common link, a frame meets its impairment once, so `delay 5ms` means five milliseconds
    from one host to another, as with netem on each host's interface. Between a host with a link of its own and one
    without, a frame meets only the former's impairment, in either direction. Between two hosts with links of their own,
    it meets both.

    Attributes:
        link: the link of every host that has none of its own.
        host_links: links of individual hosts, by host.
        seed: the seed for everything that is drawn.

    Raises:
        ArgumentError: the links differ in their mtu.
    """

    link: Link
    host_links: Mapping[int, Link] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for host, link in self.host_links.items():
            if link.mtu != self.link.mtu:
                raise ArgumentError(
                    f"the link of host {host} has an mtu of {link.mtu} and the others have one of {self.link.mtu}: "
                    "frames cross links unchanged, so use the same mtu for every link"
                )

    @property
    def mtu(self) -> int:
        """The mtu of all links."""
        return self.link.mtu

    @property
    def links(self) -> tuple[Link, ...]:
        """All distinct links."""
        return (self.link, *self.host_links.values())

    def up(self, host: int) -> Link:
        """Return the link from a host to the switch."""
        return self.host_links.get(host, self.link)

    def down(self, host: int) -> Link:
        """Return the link from the switch to a host."""
        return self.up(host).down or self.up(host)

    def rates(self, hosts: int) -> dict[str, list[float]]:
        """Return bytes per second by host, from it ("up") and to it ("down")."""
        links = {"up": self.up, "down": self.down}
        return {name: [link(host).bytes_per_second for host in range(hosts)] for name, link in links.items()}

    def path_impairments(self, source: int, target: int) -> tuple[Impairment, Impairment]:
        """Return what a frame meets on its way up from its source, and on its way down to its target."""
        if source in self.host_links or target in self.host_links:
            up = self.up(source).impairment if source in self.host_links else NOTHING
            return up, self.down(target).impairment if target in self.host_links else NOTHING
        return self.link.impairment, self.link.down.impairment if self.link.down else NOTHING

    def min_delay(self, source: int, target: int) -> float:
        """Return the minimum delay that impairments add from one host to another, in seconds."""
        return sum(impairment.shortest_seconds for impairment in self.path_impairments(source, target))

    def with_mtu(self, mtu: int) -> Topology:
        """Return the same topology with another mtu on all links."""
        return Topology(_with_mtu(self.link, mtu), {}, self.seed).with_links(self.host_links)

    def with_links(self, host_links: Mapping[int, Link]) -> Topology:
        """Return the same topology with these links for individual hosts, at the other links' mtu."""
        return replace(self, host_links={host: _with_mtu(link, self.mtu) for host, link in host_links.items()})

    @property
    def is_plain(self) -> bool:
        """Whether links have rates only, the same for all hosts and directions, which the kernel's tbf can do."""
        return not self.host_links and self.link.down is None and not self.link.impairment


@dataclass(frozen=True, slots=True)
class State:
    """A network at one moment.

    Attributes:
        topology: its links.
        gone: the hosts that are cut off: nothing leaves or reaches them.
        background: neighbors' traffic, as texts (background.py).
    """

    topology: Topology
    gone: tuple[int, ...] = ()
    background: tuple[str, ...] = ()


def _with_mtu(link: Link, mtu: int) -> Link:
    return replace(link, mtu=mtu, down=None if link.down is None else replace(link.down, mtu=mtu))


def parse_host_links(texts: Iterable[str], hosts: int) -> dict[int, Link]:
    """Parse links by host, from texts like `2=100mbit delay 20ms`. Raise ArgumentError as `by_host` and `parse_link`
    do."""
    return by_host(texts, hosts, 'its link: pass one like "2=100mbit delay 20ms"', parse_link)


def recorded_topology(network: Mapping[str, Any] | None) -> Topology | None:
    """Rebuild the topology that `Machines.describe` recorded; None if nothing shaped the links, or they changed."""
    if not network or not network.get("link") or network.get("rates") is None:
        return None
    host_links = {int(host): parse_link(text) for host, text in (network.get("own") or {}).items()}
    topology = Topology(parse_link(network["link"])).with_links(host_links)
    return topology.with_mtu(int(network["mtu"])) if network.get("mtu") else topology
