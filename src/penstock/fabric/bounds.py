"""What no algorithm can beat on the links that were measured.

Each rank has bytes that it has to send and to receive, whatever the algorithm: nobody else has its contribution, and
its result comes from others. They pass its port at the rate of its fastest link at most, and the first of them is under
way for as long as its nearest neighbour is off. An all-reduce moves 2(n-1) times its size in all (P. Patarasuk and
X. Yuan, Bandwidth optimal all-reduce algorithms, 2009), which the ports together have to carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.fabric.models import LinkFit

Measured = tuple[tuple[int, int], LinkFit]
"""The ends of a link, from and to, and what it was measured at."""


class _Port(NamedTuple):
    """A rank's: bytes a second out and in, and the seconds to its nearest neighbour."""

    out: float
    into: float
    latency_seconds: float


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
) -> float | None:
    """The least that a collective can take, by any algorithm.

    Args:
        links: as far as they were measured; one direction stands for both where the other was not.
        collective: of `penstock.fabric.algorithms`.
        members: the ranks that take part, the root or the sender first; two or more.
        size_bytes: nccl-tests' size.
        shares: of an uneven all_to_all, see `Transfer`.

    Returns:
        None where no link was measured.

    Raises:
        ArgumentError: there is no such collective.
    """
    if collective not in _NEEDS:
        raise ArgumentError(f"{collective!r} is not a collective: known are {', '.join(_NEEDS)}")
    links = tuple(links)
    if not links:
        return None
    ports = [_port(rank, links) for rank in members]
    bound = max(
        _through(port, *(share * size_bytes for share in _needs(collective, len(members), place, shares)))
        for place, port in enumerate(ports)
    )
    if collective == "all_reduce":
        carried = 2 * (len(ports) - 1) * size_bytes / sum(port.out for port in ports)
        bound = max(bound, carried + min(port.latency_seconds for port in ports))
    return bound


def _needs(collective: str, ranks: int, place: int, shares: Sequence[int]) -> tuple[float, float]:
    """What a rank has to send and to receive, as shares of the size."""
    if not shares:
        return _NEEDS[collective](ranks, place == 0)
    own = shares[place] / sum(shares)
    return 1 - own, (ranks - 1) * own


def _port(rank: int, links: Sequence[Measured]) -> _Port:
    own = [one for one in links if rank in one[0]] or links
    leaving = [link for ends, link in own if ends[0] == rank] or [link for _, link in own]
    arriving = [link for ends, link in own if ends[1] == rank] or [link for _, link in own]
    return _Port(
        max(link.bytes_per_second for link in leaving),
        max(link.bytes_per_second for link in arriving),
        min(link.alpha_seconds for _, link in own),
    )


def _through(port: _Port, sent: float, received: float) -> float:
    """Seconds of so many bytes; an infinite rate takes none."""
    return port.latency_seconds + max(
        0.0 if math.isinf(rate) else size / rate for size, rate in ((sent, port.out), (received, port.into))
    )
