"""Straight to whom it is for: no byte is sent twice, and every rank may have to do with every other one."""

from __future__ import annotations

from penstock.fabric.steps import Move, StepList


def send(ranks: int) -> StepList:
    """From rank 0 to rank 1; other ranks look on."""
    return StepList("send", "direct", ranks, 1, 1, ((Move(0, 1, 0, 1, 0),),))


def gather(ranks: int) -> StepList:
    """All to the root at once: one round, (n-1)/n of the size into one port (incast)."""
    moves = tuple(Move(rank, 0, rank, 1, rank) for rank in range(1, ranks))
    return StepList("gather", "direct", ranks, ranks, ranks, (moves,))


def all_to_all(ranks: int) -> StepList:
    """All at once: one round, (n-1)/n of the size."""
    moves = tuple(move for distance in range(1, ranks) for move in _exchange(ranks, distance))
    return StepList("all_to_all", "direct", ranks, ranks, 2 * ranks, (moves,), ranks)


def all_to_all_pairwise(ranks: int) -> StepList:
    """To the rank at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size, and never two into one port."""
    rounds = tuple(_exchange(ranks, distance) for distance in range(1, ranks))
    return StepList("all_to_all", "pairwise", ranks, ranks, 2 * ranks, rounds, ranks)


def reduce_scatter_pairwise(ranks: int) -> StepList:
    """Each part to its rank, from the one at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size."""
    rounds = []
    for distance in range(1, ranks):
        targets = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
        rounds.append(tuple(Move(rank, target, target, 1, target, adds=True) for rank, target in targets))
    return StepList("reduce_scatter", "pairwise", ranks, ranks, ranks, tuple(rounds))


def _exchange(ranks: int, distance: int) -> tuple[Move, ...]:
    """Each rank's part for the one at a distance, into the slot of the sender in the output."""
    targets = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
    return tuple(Move(rank, target, target, 1, ranks + rank) for rank, target in targets)
