"""From the root to all, or from all to the root: binomial trees, pipelined chains, van de Geijn's scatter-allgather."""

from __future__ import annotations

from dataclasses import replace

from penstock.network.fabric.algorithms.ring import gathered
from penstock.network.fabric.steps import PIECES, Move, Rounds, StepList, mirrored


def broadcast_binomial(ranks: int) -> StepList:
    """Every rank that has the data passes it on: ceil(log2 n) rounds of the whole size each."""
    rounds = tuple(tuple(Move(move.source, move.target, 0, 1, 0) for move in moves) for moves in _scattered(ranks))
    return StepList("broadcast", "binomial", ranks, 1, 1, rounds)


def broadcast_scattered(ranks: int) -> StepList:
    """A binomial scatter, then a ring all-gather: ceil(log2 n) + n-1 rounds, about twice the size.

    (Barnett, Shuler, Gupta, Payne, van de Geijn and Watts, "Building a high-performance collective communication
    library", 1994.)
    """
    return StepList("broadcast", "scatter-allgather", ranks, ranks, ranks, _scattered(ranks) + gathered(ranks))


def broadcast_chain(ranks: int) -> StepList:
    """From rank to rank, piece by piece: n-2 + k rounds of 1/k of the size each, for k pieces."""
    rounds = tuple(
        tuple(Move(hop, hop + 1, n - hop, 1, n - hop) for hop in range(ranks - 1) if 0 <= n - hop < PIECES)
        for n in range(ranks - 2 + PIECES)
    )
    return StepList("broadcast", "chain", ranks, PIECES, PIECES, rounds)


def reduce_binomial(ranks: int) -> StepList:
    """A binomial broadcast in reverse, adding: ceil(log2 n) rounds of the whole size each."""
    return StepList("reduce", "binomial", ranks, 1, 1, _adding(mirrored(broadcast_binomial(ranks).rounds)))


def reduce_chain(ranks: int) -> StepList:
    """From the last rank to the root, piece by piece, each rank adding its own: n-2 + k rounds of 1/k of the size."""
    return StepList("reduce", "chain", ranks, PIECES, PIECES, _adding(mirrored(broadcast_chain(ranks).rounds)))


def scatter_binomial(ranks: int) -> StepList:
    """Each round passes on half of what a rank holds: ceil(log2 n) rounds, (n-1)/n of the size out of the root."""
    return StepList("scatter", "binomial", ranks, ranks, ranks, _scattered(ranks))


def gather_binomial(ranks: int) -> StepList:
    """Each rank passes on what it has gathered: ceil(log2 n) rounds, (n-1)/n of the size into the root."""
    return StepList("gather", "binomial", ranks, ranks, ranks, mirrored(_scattered(ranks)))


def _adding(rounds: Rounds) -> Rounds:
    return tuple(tuple(replace(move, adds=True) for move in moves) for moves in rounds)


def _scattered(ranks: int) -> Rounds:
    """Rank r receives its own part and those of the ranks below it in the tree."""
    rounds, reach = [], 1 << (ranks - 1).bit_length()
    while reach > 1:
        half = reach // 2
        moves = []
        for rank in range(0, ranks - half, reach):
            first = rank + half
            moves.append(Move(rank, first, first, min(rank + reach, ranks) - first, first))
        rounds.append(tuple(moves))
        reach = half
    return tuple(rounds)
