"""A network of hosts around one switch: each host's link, and what a frame meets from one host to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.errors import ArgumentError
from penstock.network.impairment import NOTHING, Impairment
from penstock.network.link import Link
from penstock.network.parse import parse_link


@dataclass(frozen=True, slots=True)
class Topology:
    """What joins the hosts.

    Between two hosts with the common link a frame meets its impairment once, so that `delay 5ms` means five
    milliseconds from one host to another, as with netem on each host's interface. Between a host with a link of its own
    and one without, it meets that link's alone, in either direction; between two with links of their own, both.

    Attributes:
        link: of every host without its own.
        own: by host.
        seed: of all that is drawn.

    Raises:
        ArgumentError: links with different mtu.
    """

    link: Link
    own: Mapping[int, Link] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for host, link in self.own.items():
            if link.mtu != self.link.mtu:
                raise ArgumentError(
                    f"the link of host {host} has an mtu of {link.mtu} and the others one of {self.link.mtu}: frames "
                    "pass all links as they are, so give the same one to all"
                )

    @property
    def mtu(self) -> int:
        """Of all links."""
        return self.link.mtu

    @property
    def links(self) -> tuple[Link, ...]:
        """Every distinct link."""
        return (self.link, *self.own.values())

    def up(self, host: int) -> Link:
        """From a host to the switch."""
        return self.own.get(host, self.link)

    def down(self, host: int) -> Link:
        """From the switch to a host."""
        return self.up(host).down or self.up(host)

    def rates(self, hosts: int) -> dict[str, list[float]]:
        """Bytes per second by host, from it ("up") and to it ("down")."""
        ways = {"up": self.up, "down": self.down}
        return {way: [link(host).bytes_per_second for host in range(hosts)] for way, link in ways.items()}

    def meets(self, source: int, target: int) -> tuple[Impairment, Impairment]:
        """What a frame meets on its way up from its source and on its way down to its target."""
        if source in self.own or target in self.own:
            up = self.up(source).impairment if source in self.own else NOTHING
            return up, self.down(target).impairment if target in self.own else NOTHING
        return self.link.impairment, self.link.down.impairment if self.link.down else NOTHING

    def with_mtu(self, mtu: int) -> Topology:
        """The same with another mtu for all."""
        return Topology(_sized(self.link, mtu), {}, self.seed).with_own(self.own)

    def with_own(self, own: Mapping[int, Link]) -> Topology:
        """The same with these links for single hosts, at the mtu of the other links."""
        return replace(self, own={host: _sized(link, self.mtu) for host, link in own.items()})

    @property
    def is_plain(self) -> bool:
        """Rates alone, the same for all and in both directions: what the kernel's tbf can do."""
        return not self.own and self.link.down is None and not self.link.impairment


def _sized(link: Link, mtu: int) -> Link:
    return replace(link, mtu=mtu, down=None if link.down is None else replace(link.down, mtu=mtu))


def parse_own(texts: Sequence[str], hosts: int) -> dict[int, Link]:
    """Links by host, from texts like `2=100mbit delay 20ms`.

    Raises:
        ArgumentError: a text is not a link, the host does not exist, or a host gets two links.
    """
    found: dict[int, Link] = {}
    for text in texts:
        number, sign, link = text.partition("=")
        if not sign or not (number.strip().isascii() and number.strip().isdigit()):
            raise ArgumentError(
                f'{text!r} is not a link of a host: give the host and its link, like "2=100mbit delay 20ms"'
            )
        host = int(number)
        if host >= hosts:
            raise ArgumentError(f"a link is given for host {host}, but the hosts are 0 to {hosts - 1}")
        if host in found:
            raise ArgumentError(f"host {host} is given two links, {found[host]} and {link.strip()}: give one")
        found[host] = parse_link(link)
    return found
