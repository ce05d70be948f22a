"""The rate at which each host's port carries message bytes: as its shapers allow, or as far as measured streams show.

A stream between two hosts reveals the slower end of its path. A host with several partners may carry several such
streams at once, so a port's rate is certain only if its shaper is known.
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
"""A link's ends (from, to), and its measured values."""


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a host's port.

    Attributes:
        bytes_per_second: the rate of message bytes.
        burst_bytes: message bytes that pass at once after an idle period.
    """

    bytes_per_second: float
    burst_bytes: float = 0.0

    def seconds(self, size: float) -> float:
        """Returns how long `size` bytes take to pass; 0 at an infinite rate."""
        return 0.0 if math.isinf(self.bytes_per_second) else max(size - self.burst_bytes, 0.0) / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of all hosts.

    Attributes:
        up, down: by host, leaving it and arriving at it.
        latencies: in seconds, by (source, target).
        other_latency: the latency of pairs that are not in `latencies`.
    """

    up: tuple[Port, ...]
    down: tuple[Port, ...]
    latencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    other_latency: float = 0.0

    def latency(self, source: int, target: int) -> float:
        return self.latencies.get((source, target), self.other_latency)


def changed(record: Mapping[str, Any]) -> bool:
    """Whether a scenario may have changed the links during the run, in which case their properties are not known."""
    network = record.get("network") or {}
    return bool(network.get("link")) and network.get("rates") is None


def topology_of(network: Mapping[str, Any] | None) -> Topology | None:
    """Rebuilds the topology that `Machines.described` recorded; None if nothing shaped the links, or they changed."""
    if not network or not network.get("link") or network.get("rates") is None:
        return None
    own = {int(host): parse_link(text) for host, text in (network.get("own") or {}).items()}
    plain = Topology(parse_link(network["link"])).with_own(own)
    return plain.with_mtu(int(network["mtu"])) if network.get("mtu") else plain


def least_delay(topology: Topology, source: int, target: int) -> float:
    """Returns the seconds that impairments delay every frame from one host to another, at least."""
    return sum(met.shortest_seconds for met in topology.meets(source, target))


def shaped_ports(record: Mapping[str, Any], links: Iterable[Measured]) -> Ports | None:
    """Returns the ports as shaped according to a run's record; None if the shapers are unknown.

    A message's cost beyond the shaper's delay is taken as the least that was measured. If delays vary, that cost cannot
    be told from luck and is left out.
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
    """Estimates the ports from measured streams alone, to guess how long a run takes; None if no link was measured."""
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
