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
        own: links of individual hosts, by host.
        seed: the seed for everything that is drawn.

    Raises:
        ArgumentError: the links differ in their mtu.
    """

    link: Link
    own: Mapping[int, Link] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for host, link in self.own.items():
            if link.mtu != self.link.mtu:
                raise ArgumentError(
                    f"the link of host {host} has an mtu of {link.mtu} and the others have one of {self.link.mtu}: "
                    "frames cross links unchanged, so give every link the same mtu"
                )

    @property
    def mtu(self) -> int:
        """Of all links."""
        return self.link.mtu

    @property
    def links(self) -> tuple[Link, ...]:
        """All distinct links."""
        return (self.link, *self.own.values())

    def up(self, host: int) -> Link:
        """Return the link from a host to the switch."""
        return self.own.get(host, self.link)

    def down(self, host: int) -> Link:
        """Return the link from the switch to a host."""
        return self.up(host).down or self.up(host)

    def rates(self, hosts: int) -> dict[str, list[float]]:
        """Return bytes per second by host, from it ("up") and to it ("down")."""
        ways = {"up": self.up, "down": self.down}
        return {way: [link(host).bytes_per_second for host in range(hosts)] for way, link in ways.items()}

    def meets(self, source: int, target: int) -> tuple[Impairment, Impairment]:
        """Return what a frame meets on its way up from its source, and on its way down to its target."""
        if source in self.own or target in self.own:
            up = self.up(source).impairment if source in self.own else NOTHING
            return up, self.down(target).impairment if target in self.own else NOTHING
        return self.link.impairment, self.link.down.impairment if self.link.down else NOTHING

    def least_delay(self, source: int, target: int) -> float:
        """Return the seconds that impairments delay every frame from one host to another, at least."""
        return sum(met.shortest_seconds for met in self.meets(source, target))

    def with_mtu(self, mtu: int) -> Topology:
        """Return the same topology with another mtu on all links."""
        return Topology(_sized(self.link, mtu), {}, self.seed).with_own(self.own)

    def with_own(self, own: Mapping[int, Link]) -> Topology:
        """Return the same topology with these links for individual hosts, at the other links' mtu."""
        return replace(self, own={host: _sized(link, self.mtu) for host, link in own.items()})

    @property
    def is_plain(self) -> bool:
        """True if links have rates only, the same for all hosts and directions, which the kernel's tbf can do."""
        return not self.own and self.link.down is None and not self.link.impairment


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


def _sized(link: Link, mtu: int) -> Link:
    return replace(link, mtu=mtu, down=None if link.down is None else replace(link.down, mtu=mtu))


def parse_own(texts: Iterable[str], hosts: int) -> dict[int, Link]:
    """Parse links by host, from texts like `2=100mbit delay 20ms`. Raise ArgumentError as `by_host` and `parse_link`
    do."""
    return by_host(texts, hosts, 'its link: pass one like "2=100mbit delay 20ms"', parse_link)


def topology_of(network: Mapping[str, Any] | None) -> Topology | None:
    """Rebuild the topology that `Machines.described` recorded; None if nothing shaped the links, or they changed."""
    if not network or not network.get("link") or network.get("rates") is None:
        return None
    own = {int(host): parse_link(text) for host, text in (network.get("own") or {}).items()}
    plain = Topology(parse_link(network["link"])).with_own(own)
    return plain.with_mtu(int(network["mtu"])) if network.get("mtu") else plain
