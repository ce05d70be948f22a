"""What no algorithm can beat on the links of a run.

Each rank has bytes that it has to send and to receive, whatever the algorithm: nobody else has its contribution, and
its result comes from others. They pass its port at its shaper's rate at most, and the first of them is under way for as
long as its nearest neighbour is off. Where no shaper is known a stream between two hosts bounds what these two do, and
nothing where a port has several partners: it may carry several streams. An all-reduce moves 2(n-1) times its size in
all (P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms, 2009), which the ports together have to carry.
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
"""What a rank has to send and to receive, as shares of the size, among n ranks; the root is the first."""


def lower_bound_seconds(
    links: Iterable[Measured],
    collective: str,
    members: Sequence[int],
    size_bytes: float,
    shares: Sequence[int] = (),
    ports: Ports | None = None,
    iterations: int = 1,
) -> float | None:
    """The least that a collective can take, by any algorithm.

    Args:
        links: as far as they were measured; one direction stands for both where the other was not.
        collective: of `penstock.fabric.algorithms`.
        members: the ranks that take part, the root or the sender first; two or more.
        size_bytes: nccl-tests' size.
        shares: of an uneven all_to_all, see `Transfer`.
        ports: of all hosts, by their shapers; None: nobody knows them.
        iterations: of which a mean is meant: one may be under way while another begins.

    Returns:
        None where nobody knows: a port's shaper is not known and it has several partners, or its link to the only
        partner was not measured.

    Raises:
        ArgumentError: there is no such collective.
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
    """All that leads from a rank, or to it: the port, and the seconds to the nearest partner."""

    port: Port
    latency_seconds: float

    def seconds(self, size: float, iterations: int) -> float:
        """Of one of so many iterations in a row, each of so many bytes; what has nothing to carry takes none."""
        if not size:
            return 0.0
        return (self.latency_seconds + self.port.seconds(size * iterations)) / iterations


def _partners(collective: str, place: int, members: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Whom a rank may send to, and whom it may receive from."""
    if collective == "sendrecv":
        return [members[(place + 1) % len(members)]], [members[place - 1]]
    others = [rank for rank in members if rank != members[place]]
    return others, others


def _joined(
    ports: Ports | None, links: dict[tuple[int, int], LinkFit], pairs: Sequence[tuple[int, int]]
) -> _Way | None:
    """The way through one rank's port by all of these pairs; the slower end of one pair counts."""
    if ports is None:
        (pair, *more) = pairs
        link = links.get(pair, links.get(pair[::-1]))
        return None if more or link is None else _Way(Port(link.bytes_per_second), link.alpha_seconds)
    # One of the two is the rank's own port, the same for all pairs.
    up, down = [ports.up[a] for a in {a for a, _ in pairs}], [ports.down[b] for b in {b for _, b in pairs}]
    slower = min((_sum(up), _sum(down)), key=lambda port: port.bytes_per_second)
    return _Way(slower, min(ports.latency(*pair) for pair in pairs))


def _together(ways: Sequence[_Way]) -> _Way:
    return _Way(_sum([way.port for way in ways]), min(way.latency_seconds for way in ways))


def _sum(ports: Sequence[Port]) -> Port:
    return Port(sum(one.bytes_per_second for one in ports), sum(one.burst_bytes for one in ports))


def _needs(collective: str, ranks: int, place: int, shares: Sequence[int]) -> tuple[float, float]:
    """What a rank has to send and to receive, as shares of the size."""
    if not shares:
        return _NEEDS[collective](ranks, place == 0)
    own = shares[place] / sum(shares)
    return 1 - own, (ranks - 1) * own
