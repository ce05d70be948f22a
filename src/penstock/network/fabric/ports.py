"""The rate at which each host's port carries message bytes, and what no collective can beat on them.

Rates are those that shapers allow.

A stream between two hosts reveals the slower end of its path. A host with several partners may carry several such
streams at once, so a port's rate is certain only if its shaper is known.

A lower bound holds for any algorithm: each rank must send a certain number of bytes, because only it has its
contribution, and must receive some, because others hold parts of its result. Its port passes them at the shaper's rate
at most, and the first byte takes at least the latency to the nearest partner. If no shaper is known, a measured stream
bounds a rank with a single partner. It does not bound a port with several partners, which may carry several streams at
once. An all-reduce moves 2(n-1) times its size in total (P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce
algorithms, 2009), and all ports together must carry that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.network.fabric.alpha_beta import LinkFit
from penstock.network.fabric.samples import RunRecord
from penstock.network.link import Link

FittedLink = tuple[tuple[int, int], LinkFit]
"""A link's ends (from, to), and its measured values."""


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a host's port, or of several ports together.

    Attributes:
        bytes_per_second: the rate of message bytes.
        burst_bytes: message bytes that pass at once after an idle period.
        latency_seconds: to the nearest partner.
    """

    bytes_per_second: float
    burst_bytes: float = 0.0
    latency_seconds: float = 0.0

    def seconds(self, size: float, iterations: int = 1) -> float:
        """Return the time per iteration when each of `iterations` moves `size` bytes; 0 if nothing is moved."""
        if not size:
            return 0.0
        remaining = 0.0 if math.isinf(self.bytes_per_second) else max(size * iterations - self.burst_bytes, 0.0)
        return (self.latency_seconds + remaining / self.bytes_per_second) / iterations


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of all hosts.

    Attributes:
        up, down: by host, leaving it and arriving at it.
        latencies: in seconds, by (source, target).
    """

    up: tuple[Port, ...]
    down: tuple[Port, ...]
    latencies: Mapping[tuple[int, int], float]


def shaped_ports(record: RunRecord, links: Iterable[FittedLink]) -> Ports | None:
    """Return the ports as shaped according to a run's record; None if the shapers are unknown.

    A message's cost beyond the shaper's delay is taken as the least that was measured. If delays vary, that cost cannot
    be told from luck and is left out.
    """
    hosts, topology, network = record.hosts, record.topology, record.network
    if topology is None or network is None:
        return None
    exact = network["shaper"] == "switch"
    overheads = [max(link.alpha_seconds - topology.min_delay(*ends), 0.0) for ends, link in links]
    overhead = 0.0 if any(link.varies for link in topology.links) else min(overheads, default=0.0)
    pairs = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    return Ports(
        tuple(_port(link, 0 if exact else link.burst) for link in map(topology.up, range(hosts))),
        tuple(_port(link, 0 if exact else link.port_burst) for link in map(topology.down, range(hosts))),
        {pair: topology.min_delay(*pair) + overhead for pair in pairs},
    )


def _port(link: Link, burst: int) -> Port:
    return Port(link.bytes_per_second * link.goodput_ratio, burst * link.goodput_ratio)


# -- lower bounds ------------------------------------------------------------------------------------------------------

_NEEDS: dict[str, Callable[[int, bool], tuple[float, float]]] = {
    "all_reduce": lambda n, root: (1.0, 1.0),
    "all_gather": lambda n, root: (1 / n, (n - 1) / n),
    "reduce_scatter": lambda n, root: ((n - 1) / n, 1 / n),
    "all_to_all": lambda n, root: ((n - 1) / n, (n - 1) / n),
    "broadcast": lambda n, root: (1.0, 0.0) if root else (0.0, 1.0),
    "gather": lambda n, root: (0.0, (n - 1) / n) if root else (1 / n, 0.0),
    "reduce": lambda n, root: (0.0, 1.0) if root else (1.0, 0.0),
    "scatter": lambda n, root: ((n - 1) / n, 0.0) if root else (0.0, 1 / n),
    "sendrecv": lambda n, root: (1.0, 1.0),
    "send": lambda n, root: (1.0, 0.0) if root else (0.0, 1.0),
}
"""What a rank must send and receive, as fractions of the size, among n ranks; the root is the first rank."""


def lower_bound_seconds(
    links: Iterable[FittedLink],
    collective: str,
    members: Sequence[int],
    size_bytes: float,
    shares: Sequence[int] = (),
    ports: Ports | None = None,
    iterations: int = 1,
) -> float | None:
    """Return the least time a collective can take with any algorithm, in seconds.

    Args:
        links: the measured links; if one direction of a pair was not measured, the other stands in for it.
        collective: a name from `penstock.network.fabric.algorithms`.
        members: the participating ranks, two or more, with the root or sender first.
        size_bytes: the size as nccl-tests defines it.
        shares: for an uneven all_to_all; see `Transfer`.
        ports: the shaped ports of all hosts; None if they are unknown.
        iterations: the number of back-to-back iterations the time is averaged over; each may start before the last one
            ends.

    Returns:
        None if the bound is unknown: a port has no known shaper and several partners, or the link to its only partner
        was not measured.
    """
    by_pair, ranks = dict(links), len(members)
    bounds: list[float] = []
    paths: list[tuple[Port, Port]] = []  # of each rank, out and in
    for index, rank in enumerate(members):
        targets, sources = [[peer for peer in members if peer != rank]] * 2
        if collective == "sendrecv":
            targets, sources = [members[(index + 1) % ranks]], [members[index - 1]]
        leaving = _path(ports, by_pair, [(rank, peer) for peer in targets])
        arriving = _path(ports, by_pair, [(peer, rank) for peer in sources])
        if leaving is None or arriving is None:
            return None
        needs = _NEEDS[collective](ranks, index == 0)
        if shares:
            own_share = shares[index] / sum(shares)
            needs = 1 - own_share, (ranks - 1) * own_share
        paths.append((leaving, arriving))
        bounds += [port.seconds(share * size_bytes, iterations) for port, share in zip(paths[-1], needs, strict=True)]
    if collective == "all_reduce":
        carried = 2 * (ranks - 1) * size_bytes
        bounds += [_sum(direction).seconds(carried, iterations) for direction in zip(*paths, strict=True)]
    return max(bounds)


def _path(ports: Ports | None, links: dict[tuple[int, int], LinkFit], pairs: Sequence[tuple[int, int]]) -> Port | None:
    """Return the path through one rank's port over all these pairs; it is as fast as its slower end."""
    if ports is None:
        (pair, *remaining) = pairs
        link = links.get(pair, links.get(pair[::-1]))
        return None if remaining or link is None else Port(link.bytes_per_second, 0.0, link.alpha_seconds)
    # One of the two sides is the rank's own port, which all pairs share.
    up, down = [ports.up[a] for a in {a for a, _ in pairs}], [ports.down[b] for b in {b for _, b in pairs}]
    slower = min((_sum(up), _sum(down)), key=lambda port: port.bytes_per_second)
    return replace(slower, latency_seconds=min(ports.latencies[pair] for pair in pairs))


def _sum(ports: Sequence[Port]) -> Port:
    rate, burst = sum(port.bytes_per_second for port in ports), sum(port.burst_bytes for port in ports)
    return Port(rate, burst, min(port.latency_seconds for port in ports))
