"""What each host's port carries, in the bytes of messages: as its shapers let pass, or as far as streams have shown.

A stream between two hosts tells the slower end of their path. Where a host has several partners its port may carry
several such streams at once, so that a port's rate is known where its shaper is, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.fabric.models import LinkFit
from penstock.network.link import Link
from penstock.network.parse import parse_link
from penstock.network.topology import Topology

Measured = tuple[tuple[int, int], LinkFit]
"""The ends of a link, from and to, and what it was measured at."""


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a host's.

    Attributes:
        bytes_per_second: of what messages carry.
        burst_bytes: of them, which pass at once after an idle moment.
    """

    bytes_per_second: float
    burst_bytes: float = 0.0

    def seconds(self, size: float) -> float:
        """Of so many bytes; an infinite rate takes none."""
        return 0.0 if math.isinf(self.bytes_per_second) else max(size - self.burst_bytes, 0.0) / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Ports:
    """Of all hosts.

    Attributes:
        up, down: by host, from it and towards it.
        latencies: in seconds, from a host to another.
        other_latency: of pairs that are not in `latencies`.
    """

    up: tuple[Port, ...]
    down: tuple[Port, ...]
    latencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    other_latency: float = 0.0

    def latency(self, source: int, target: int) -> float:
        return self.latencies.get((source, target), self.other_latency)


def changed(record: Mapping[str, Any]) -> bool:
    """Whether a scenario may have changed the links while the run went on: what holds of them is not known then."""
    network = record.get("network") or {}
    return bool(network.get("link")) and network.get("rates") is None


def topology_of(network: Mapping[str, Any] | None) -> Topology | None:
    """What `Machines.described` was made from; None where nothing shaped the links, or they have changed."""
    if not network or not network.get("link") or network.get("rates") is None:
        return None
    own = {int(host): parse_link(text) for host, text in (network.get("own") or {}).items()}
    plain = Topology(parse_link(network["link"])).with_own(own)
    return plain.with_mtu(int(network["mtu"])) if network.get("mtu") else plain


def least_delay(topology: Topology, source: int, target: int) -> float:
    """Seconds of its impairments that every frame from one host to another takes."""
    return sum(met.shortest_seconds for met in topology.meets(source, target))


def shaped_ports(record: Mapping[str, Any], links: Iterable[Measured]) -> Ports | None:
    """The ports as shaped in a run's record; None if the shapers are unknown.

    What a message costs besides the shaper's delay is the least that was measured; if delays vary it cannot be told
    from luck, so it is left out.
    """
    hosts = int(record["hosts"])
    topology = topology_of(record.get("network"))
    if topology is None:
        return None
    exact = record["network"].get("shaper") == "switch"
    beside = [max(link.alpha_seconds - least_delay(topology, *ends), 0.0) for ends, link in links]
    own = 0.0 if any(link.varies for link in topology.links) else min(beside, default=0.0)
    pairs = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    return Ports(
        tuple(_port(link, 0 if exact else link.burst) for link in map(topology.up, range(hosts))),
        tuple(_port(link, 0 if exact else link.port_burst) for link in map(topology.down, range(hosts))),
        {pair: least_delay(topology, *pair) + own for pair in pairs},
    )


def _port(link: Link, burst: int) -> Port:
    return Port(link.bytes_per_second * link.goodput_ratio, burst * link.goodput_ratio)


def measured_ports(links: Iterable[Measured], hosts: int) -> Ports | None:
    """What streams alone have shown of ports, for a guess at what a run takes; None where no link was measured."""
    found = dict(links)
    if not found:
        return None
    slowest = min(link.bytes_per_second for link in found.values())

    def port(host: int, end: int) -> Port:
        own = [link.bytes_per_second for ends, link in found.items() if ends[end] == host]
        return Port(max(own, default=slowest))

    return Ports(
        tuple(port(host, 0) for host in range(hosts)),
        tuple(port(host, 1) for host in range(hosts)),
        {ends: link.alpha_seconds for ends, link in found.items()},
        max(link.alpha_seconds for link in found.values()),
    )
