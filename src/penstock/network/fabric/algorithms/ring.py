"""Ring algorithms: every rank sends only to the next one, so the load per link hardly depends on the number of ranks.

Each part travels once around the ring to collect its sum, and the sums travel around once more. This is best for large
sizes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from penstock.network.fabric.steps import Move, Rounds, StepList, joined


def all_reduce(ranks: int) -> StepList:
    """Reduce-scatter, then all-gather: 2(n-1) rounds, 2(n-1)/n of the size."""
    return StepList("all_reduce", "ring", ranks, ranks, ranks, reduced(ranks) + gathered(ranks))


def reduce_scatter(ranks: int) -> StepList:
    """One trip around the ring: n-1 rounds, (n-1)/n of the size."""
    return StepList("reduce_scatter", "ring", ranks, ranks, ranks, reduced(ranks))


def all_gather(ranks: int) -> StepList:
    """One trip around the ring: n-1 rounds, (n-1)/n of the size."""
    return StepList("all_gather", "ring", ranks, ranks, ranks, gathered(ranks))


def all_reduce_2(ranks: int) -> StepList:
    """Two rings: half of each part travels one way, half the other.

    Full-duplex ports carry as much as with one ring. Links between neighbors, as on a torus, carry half as much.
    """
    return StepList("all_reduce", "ring2", ranks, 2 * ranks, 2 * ranks, reduced(ranks, 2) + gathered(ranks, 2))


def reduce_scatter_2(ranks: int) -> StepList:
    """Both directions at once; see `all_reduce_2`."""
    return StepList("reduce_scatter", "ring2", ranks, 2 * ranks, 2 * ranks, reduced(ranks, 2))


def all_gather_2(ranks: int) -> StepList:
    """Both directions at once; see `all_reduce_2`."""
    return StepList("all_gather", "ring2", ranks, 2 * ranks, 2 * ranks, gathered(ranks, 2))


def reduced(ranks: int, ways: int = 1) -> Rounds:
    """Part p starts at the rank after p and ends at p; with two ways, its second half starts on the other side."""
    return tuple(_shift(ranks, ways, 1 + number, adds=True) for number in range(ranks - 1))


def gathered(ranks: int, ways: int = 1) -> Rounds:
    """Part p starts at rank p and reaches all others."""
    return tuple(_shift(ranks, ways, number, adds=False) for number in range(ranks - 1))


def _shift(ranks: int, ways: int, behind: int, adds: bool) -> tuple[Move, ...]:
    """Each rank passes on the part of the rank `behind` places before it in the ring's direction."""
    moves = []
    for way, step in enumerate((1, -1)[:ways]):
        for rank in range(ranks):
            slot = (rank - step * behind) % ranks * ways + way
            moves.append(Move(rank, (rank + step) % ranks, slot, 1, slot, adds))
    return joined(moves)
