"""Ring algorithms: every rank sends only to the next one, so the load per link hardly depends on the number of ranks.

Each part travels once around the ring to collect its sum, and the sums travel around once more. This is best for large
sizes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from penstock.network.fabric.steps import Collective, Move, Rounds, StepList, joined


def all_reduce(ranks: int, ways: int = 1) -> StepList:
    """Reduce-scatter, then all-gather: 2(n-1) rounds, 2(n-1)/n of the size.

    With two ways, half of each part travels one way, half the other. Full-duplex ports carry as much as with one ring.
    Links between neighbors, as on a torus, carry half as much.
    """
    return _ring("all_reduce", ranks, ways, reduced(ranks, ways) + gathered(ranks, ways))


def reduce_scatter(ranks: int, ways: int = 1) -> StepList:
    """One trip around the ring: n-1 rounds, (n-1)/n of the size."""
    return _ring("reduce_scatter", ranks, ways, reduced(ranks, ways))


def all_gather(ranks: int, ways: int = 1) -> StepList:
    """One trip around the ring: n-1 rounds, (n-1)/n of the size."""
    return _ring("all_gather", ranks, ways, gathered(ranks, ways))


def _ring(collective: Collective, ranks: int, ways: int, rounds: Rounds) -> StepList:
    return StepList(collective, "ring" if ways == 1 else f"ring{ways}", ranks, ways * ranks, ways * ranks, rounds)


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
