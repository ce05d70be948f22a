"""Lower bounds on collective times that no algorithm can beat on a run's links.

Whatever the algorithm, each rank must send a certain number of bytes, because only it has its contribution, and must
receive some, because others hold parts of its result. Its port passes them at the shaper's rate at most, and the first
byte takes at least the latency to the nearest partner. If no shaper is known, a measured stream bounds a rank with a
single partner. It does not bound a port with several partners, which may carry several streams at once. An all-reduce
moves 2(n-1) times its size in total (P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms, 2009), and all
ports together must carry that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.fabric.models import LinkFit
from penstock.fabric.ports import Measured, Port, Ports

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
    links: Iterable[Measured],
    collective: str,
    members: Sequence[int],
    size_bytes: float,
    shares: Sequence[int] = (),
    ports: Ports | None = None,
    iterations: int = 1,
) -> float | None:
    """Returns the least time a collective can take with any algorithm, in seconds.

    Args:
        links: the measured links; if one direction of a pair was not measured, the other stands in for it.
        collective: a name from `penstock.fabric.algorithms`.
        members: the participating ranks, two or more, with the root or sender first.
        size_bytes: the size as nccl-tests defines it.
        shares: for an uneven all_to_all; see `Transfer`.
        ports: the shaped ports of all hosts; None if they are unknown.
        iterations: the number of back-to-back iterations the time is averaged over; each may start before the last one
            ends.

    Returns:
        None if the bound is unknown: a port has no known shaper and several partners, or the link to its only partner
        was not measured.

    Raises:
        ArgumentError: the collective does not exist.
    """
    if collective not in _NEEDS:
        raise ArgumentError(f"{collective!r} is not a collective: known are {', '.join(_NEEDS)}")
    found = dict(links)
    bounds, out, into = [], [], []
    for place, rank in enumerate(members):
        targets, sources = _partners(collective, place, members)
        leaving = _joined(ports, found, [(rank, other) for other in targets])
        arriving = _joined(ports, found, [(other, rank) for other in sources])
        if leaving is None or arriving is None:
            return None
        sent, received = (share * size_bytes for share in _needs(collective, len(members), place, shares))
        bounds += [leaving.seconds(sent, iterations), arriving.seconds(received, iterations)]
        out.append(leaving)
        into.append(arriving)
    if collective == "all_reduce":
        carried = 2 * (len(members) - 1) * size_bytes
        bounds += [_together(ways).seconds(carried, iterations) for ways in (out, into)]
    return max(bounds)


class _Way(NamedTuple):
    """A rank's combined outgoing or incoming path: its port, and the latency to its nearest partner in seconds."""

    port: Port
    latency_seconds: float

    def seconds(self, size: float, iterations: int) -> float:
        """Returns the time per iteration when each of `iterations` moves `size` bytes; 0 if nothing is moved."""
        if not size:
            return 0.0
        return (self.latency_seconds + self.port.seconds(size * iterations)) / iterations


def _partners(collective: str, place: int, members: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the ranks that a rank may send to, and those it may receive from."""
    if collective == "sendrecv":
        return [members[(place + 1) % len(members)]], [members[place - 1]]
    others = [rank for rank in members if rank != members[place]]
    return others, others


def _joined(
    ports: Ports | None, links: dict[tuple[int, int], LinkFit], pairs: Sequence[tuple[int, int]]
) -> _Way | None:
    """Returns the path through one rank's port over all these pairs; it is as fast as its slower end."""
    if ports is None:
        (pair, *more) = pairs
        link = links.get(pair, links.get(pair[::-1]))
        return None if more or link is None else _Way(Port(link.bytes_per_second), link.alpha_seconds)
    # One of the two sides is the rank's own port, which all pairs share.
    up, down = [ports.up[a] for a in {a for a, _ in pairs}], [ports.down[b] for b in {b for _, b in pairs}]
    slower = min((_sum(up), _sum(down)), key=lambda port: port.bytes_per_second)
    return _Way(slower, min(ports.latency(*pair) for pair in pairs))


def _together(ways: Sequence[_Way]) -> _Way:
    return _Way(_sum([way.port for way in ways]), min(way.latency_seconds for way in ways))


def _sum(ports: Sequence[Port]) -> Port:
    return Port(sum(one.bytes_per_second for one in ports), sum(one.burst_bytes for one in ports))


def _needs(collective: str, ranks: int, place: int, shares: Sequence[int]) -> tuple[float, float]:
    """Returns what a rank must send and receive, as fractions of the size."""
    if not shares:
        return _NEEDS[collective](ranks, place == 0)
    own = shares[place] / sum(shares)
    return 1 - own, (ranks - 1) * own
