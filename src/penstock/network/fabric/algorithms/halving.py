"""Recursive halving and doubling: partners at distance n/2, n/4, ... 1 exchange what the other needs.

This takes log2 n rounds each way. A number of ranks that is not a power of two is folded: in each of the first pairs,
the even rank gives all of its data to the odd one, sits out the exchange, and receives the result at the end (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.network.fabric.steps import Move, Rounds, StepList, mirrored


@dataclass(frozen=True, slots=True)
class _Fold:
    """The 2^k ranks that take part in the exchange.

    Attributes:
        core: the participating ranks.
        pairs: (rank that sits out, its partner in the core).
    """

    core: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranks: int) -> _Fold:
        extra = ranks - (1 << (ranks.bit_length() - 1))
        pairs = tuple((2 * place, 2 * place + 1) for place in range(extra))
        return cls(tuple(odd for _, odd in pairs) + tuple(range(2 * extra, ranks)), pairs)

    def bounds(self) -> tuple[int, ...]:
        """Returns where each core member's parts begin, and where the last ends; a member of a pair has two parts."""
        extra = len(self.pairs)
        return tuple(2 * place if place < extra else place + extra for place in range(len(self.core) + 1))

    def enter(self, chunks: int) -> Rounds:
        """Returns the round that adds the data of the ranks outside the core to that of their partners."""
        return _once(tuple(Move(out, core, 0, chunks, 0, adds=True) for out, core in self.pairs))

    def leave(self, chunks: int) -> Rounds:
        """Returns the round that sends the whole result to the ranks outside the core."""
        return _once(tuple(Move(core, out, 0, chunks, 0) for out, core in self.pairs))


def all_reduce(ranks: int) -> StepList:
    """Halving, then doubling: 2 log2 n rounds, 2(n-1)/n of the size.

    If n is not a power of two, folding adds 2 rounds and twice the size.
    """
    fold = _Fold.of(ranks)
    chunks = len(fold.core)
    bounds = tuple(range(chunks + 1))
    rounds = fold.enter(chunks) + _halved(fold.core, bounds) + _doubled(fold.core, bounds) + fold.leave(chunks)
    return StepList("all_reduce", "halving-doubling", ranks, chunks, chunks, rounds)


def all_reduce_whole(ranks: int) -> StepList:
    """Partners exchange all their data: log2 n rounds of the whole size each, for sizes at which latency dominates."""
    fold = _Fold.of(ranks)
    rounds, distance = fold.enter(1), 1
    while distance < len(fold.core):
        rounds += (
            tuple(Move(rank, fold.core[place ^ distance], 0, 1, 0, adds=True) for place, rank in enumerate(fold.core)),
        )
        distance *= 2
    return StepList("all_reduce", "recursive-doubling", ranks, 1, 1, rounds + fold.leave(1))


def reduce_scatter(ranks: int) -> StepList:
    """Halving: log2 n rounds, (n-1)/n of the size.

    If n is not a power of two, folding adds 2 rounds and about (n+1)/n of the size.
    """
    fold = _Fold.of(ranks)
    last = _once(tuple(Move(core, out, out, 1, out) for out, core in fold.pairs))
    rounds = fold.enter(ranks) + _halved(fold.core, fold.bounds()) + last
    return StepList("reduce_scatter", "halving", ranks, ranks, ranks, rounds)


def all_gather(ranks: int) -> StepList:
    """The reverse of halving."""
    fold = _Fold.of(ranks)
    first = _once(tuple(Move(out, core, out, 1, out) for out, core in fold.pairs))
    rounds = first + _doubled(fold.core, fold.bounds()) + fold.leave(ranks)
    return StepList("all_gather", "recursive-doubling", ranks, ranks, ranks, rounds)


def _halved(core: tuple[int, ...], bounds: tuple[int, ...]) -> Rounds:
    """Each core member ends with the sums of its own parts: [bounds[place], bounds[place + 1])."""
    rounds, distance = [], len(core) // 2
    while distance:
        moves = []
        for place, rank in enumerate(core):
            other = place ^ distance
            begin = other - other % distance  # the first member on the partner's side from now on
            first, count = bounds[begin], bounds[begin + distance] - bounds[begin]
            moves.append(Move(rank, core[other], first, count, first, adds=True))
        rounds.append(tuple(moves))
        distance //= 2
    return tuple(rounds)


def _doubled(core: tuple[int, ...], bounds: tuple[int, ...]) -> Rounds:
    """Each core member starts with its own parts and ends with all parts."""
    return mirrored(_halved(core, bounds))


def _once(moves: tuple[Move, ...]) -> Rounds:
    return (moves,) if moves else ()
