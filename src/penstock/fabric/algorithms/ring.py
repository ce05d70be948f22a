"""Rings: every rank sends to the next one only, so each link carries the same, whatever the number of ranks.

Each part goes once around, and gathers the sums on its way; then the sums go around once more. Best for large sizes
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from penstock.fabric.steps import Move, StepList

Rounds = tuple[tuple[Move, ...], ...]


def all_reduce(ranks: int) -> StepList:
    """Reduce-scatter, then all-gather: 2(n-1) rounds, 2(n-1)/n of the size."""
    return StepList("all_reduce", "ring", ranks, ranks, ranks, _reduce(ranks, 1) + _gather(ranks, 1))


def reduce_scatter(ranks: int) -> StepList:
    """n-1 rounds, (n-1)/n of the size."""
    return StepList("reduce_scatter", "ring", ranks, ranks, ranks, _reduce(ranks, 1))


def all_gather(ranks: int) -> StepList:
    """n-1 rounds, (n-1)/n of the size."""
    return StepList("all_gather", "ring", ranks, ranks, ranks, _gather(ranks, 1))


def _reduce(ranks: int, ways: int) -> Rounds:
    """Part p starts at the rank behind p and ends at p; with two ways, its second half comes from the other side."""
    return tuple(_shift(ranks, ways, 1 + number, adds=True) for number in range(ranks - 1))


def _gather(ranks: int, ways: int) -> Rounds:
    """Part p starts at p and goes to all others."""
    return tuple(_shift(ranks, ways, number, adds=False) for number in range(ranks - 1))


def _shift(ranks: int, ways: int, behind: int, adds: bool) -> tuple[Move, ...]:
    """Each rank sends on the part of the rank that is `behind` it, seen in the direction of the ring."""
    moves = []
    for way, step in enumerate((1, -1)[:ways]):
        for rank in range(ranks):
            slot = (rank - step * behind) % ranks * ways + way
            moves.append(Move(rank, (rank + step) % ranks, slot, 1, slot, adds))
    return tuple(moves)
