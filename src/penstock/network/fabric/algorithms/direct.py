"""Direct algorithms: no byte is sent twice, but a rank may have to communicate with every other one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from penstock.network.fabric.steps import Move, StepList


def send(ranks: int) -> StepList:
    """From rank 0 to rank 1; other ranks do nothing."""
    return StepList("send", "direct", ranks, 1, 1, ((Move(0, 1, 0, 1, 0),),))


def sendrecv(ranks: int) -> StepList:
    """To the next rank and from the previous one: one round, with the whole size out of every port and into it."""
    moves = tuple(Move(rank, (rank + 1) % ranks, 0, 1, 1) for rank in range(ranks))
    return StepList("sendrecv", "direct", ranks, 1, 2, (moves,), 1)


def scatter(ranks: int) -> StepList:
    """From the root to all at once: one round, (n-1)/n of the size out of one port."""
    moves = tuple(Move(0, rank, rank, 1, rank) for rank in range(1, ranks))
    return StepList("scatter", "direct", ranks, ranks, ranks, (moves,))


def gather(ranks: int) -> StepList:
    """From all to the root at once: one round, (n-1)/n of the size into one port (incast)."""
    moves = tuple(Move(rank, 0, rank, 1, rank) for rank in range(1, ranks))
    return StepList("gather", "direct", ranks, ranks, ranks, (moves,))


def all_to_all(ranks: int, shares: tuple[int, ...] = ()) -> StepList:
    """All exchanges at once: one round, (n-1)/n of the size. `shares`: how many pieces each rank gets from every rank,
    as in a mixture of experts; empty for one each."""
    pairwise = all_to_all_pairwise(ranks, shares)
    return replace(pairwise, algorithm="direct", rounds=(tuple(chain.from_iterable(pairwise.rounds)),))


def all_to_all_pairwise(ranks: int, shares: tuple[int, ...] = ()) -> StepList:
    """Ranks at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size, and never two senders into one port.

    Each rank sends its part for another into the sender's slots of that rank's output.
    """
    parts = shares or (1,) * ranks
    chunks, rounds = sum(parts), []
    for distance in range(1, ranks):
        targets = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
        rounds.append(
            tuple(
                Move(rank, target, sum(parts[:target]), parts[target], chunks + rank * parts[target])
                for rank, target in targets
                if parts[target]
            )
        )
    uneven, slots = parts if len(set(parts)) > 1 else (), chunks + ranks * max(parts)
    return StepList("all_to_all", "pairwise", ranks, chunks, slots, tuple(rounds), chunks, uneven)


def reduce_scatter_pairwise(ranks: int) -> StepList:
    """Sends each part straight to its rank, at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size."""
    rounds = []
    for distance in range(1, ranks):
        targets = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
        rounds.append(tuple(Move(rank, target, target, 1, target, adds=True) for rank, target in targets))
    return StepList("reduce_scatter", "pairwise", ranks, ranks, ranks, tuple(rounds))
