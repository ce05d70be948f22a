"""The steps of every algorithm: families of functions from the number of ranks to rounds of messages.

n is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from penstock.network.fabric.steps import PIECES, Move, Rounds, StepList, merge_contiguous, mirror

# -- direct: no byte is sent twice, but a rank may have to communicate with every other one ----------------------------


def _at_distance(ranks: int, distance: int) -> list[tuple[int, int]]:
    """Pair each rank with the one at this distance after it."""
    return [(rank, (rank + distance) % ranks) for rank in range(ranks)]


def send(ranks: int) -> StepList:
    """Send from rank 0 to rank 1; other ranks do nothing."""
    return StepList(ranks, 1, ((Move(0, 1, 0, 1, 0),),))


def sendrecv(ranks: int) -> StepList:
    """Send to the next rank and receive from the previous one: one round, with the whole size out of every port and
    into it."""
    return StepList(ranks, 1, (tuple(Move(rank, target, 0, 1, 1) for rank, target in _at_distance(ranks, 1)),), 1, 1)


def scatter_direct(ranks: int) -> StepList:
    """Send from the root to all at once: one round, (n-1)/n of the size out of one port."""
    return StepList(ranks, ranks, (tuple(Move(0, rank, rank, 1, rank) for rank in range(1, ranks)),))


def gather_direct(ranks: int) -> StepList:
    """Send from all to the root at once: one round, (n-1)/n of the size into one port (incast)."""
    return StepList(ranks, ranks, (tuple(Move(rank, 0, rank, 1, rank) for rank in range(1, ranks)),))


def all_to_all_direct(ranks: int, shares: tuple[int, ...] = ()) -> StepList:
    """Exchange everything at once: one round, (n-1)/n of the size. `shares`: how many pieces each rank gets from every
    rank, as in a mixture of experts; empty for one each."""
    pairwise = all_to_all_pairwise(ranks, shares)
    return replace(pairwise, rounds=(tuple(chain.from_iterable(pairwise.rounds)),))


def all_to_all_pairwise(ranks: int, shares: tuple[int, ...] = ()) -> StepList:
    """Ranks at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size, and never two senders into one port.

    Each rank sends its part for another into the sender's slots of that rank's output.
    """
    parts = shares or (1,) * ranks
    chunks = sum(parts)
    rounds = tuple(
        tuple(
            Move(rank, target, sum(parts[:target]), parts[target], chunks + rank * parts[target])
            for rank, target in _at_distance(ranks, distance)
            if parts[target]
        )
        for distance in range(1, ranks)
    )
    return StepList(ranks, chunks, rounds, ranks * max(parts), chunks, parts if len(set(parts)) > 1 else ())


def reduce_scatter_pairwise(ranks: int) -> StepList:
    """Send each part straight to its rank, at distance 1, then 2, ...: n-1 rounds, (n-1)/n of the size."""
    rounds = (_at_distance(ranks, distance) for distance in range(1, ranks))
    moves = (tuple(Move(rank, to, to, 1, to, adds=True) for rank, to in pairs) for pairs in rounds)
    return StepList(ranks, ranks, tuple(moves))


# -- Bruck's: ceil(log2 n) rounds for any n; in round k, ranks at distance 2^k exchange data ---------------------------
#
# (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
# message-passing systems", 1997.) The original rotates each rank's data so that messages are contiguous, and rotates it
# back at the end. Here, slots stay where they are, and a message may consist of several moves.


def all_gather_bruck(ranks: int) -> StepList:
    """Rank r holds the parts r, r+1, ... r+2^k-1 and sends them to r-2^k: (n-1)/n of the size."""
    rounds, distance = [], 1
    while distance < ranks:
        count = min(distance, ranks - distance)  # the last round sends only what is still missing
        slots = [(rank, (rank + ahead) % ranks) for rank in range(ranks) for ahead in range(count)]
        rounds.append(merge_contiguous(Move(rank, (rank - distance) % ranks, slot, 1, slot) for rank, slot in slots))
        distance *= 2
    return StepList(ranks, ranks, tuple(rounds))


def all_to_all_bruck(ranks: int) -> StepList:
    """Move a part with i ranks to go by one set bit of i at a time, lowest first: about half of the size per round.

    On its way, a part waits in slot i of the area after input and output.
    """
    output, waiting = ranks, 2 * ranks
    rounds, distance = [], 1
    while distance < ranks:
        moves = []
        for rank, target in _at_distance(ranks, distance):
            for ahead in (ahead for ahead in range(ranks) if ahead & distance):
                starts, arrives = ahead % distance == 0, ahead < 2 * distance
                first = (rank + ahead) % ranks if starts else waiting + ahead
                moves.append(
                    Move(rank, target, first, 1, output + (target - ahead) % ranks if arrives else waiting + ahead)
                )
        rounds.append(merge_contiguous(moves))
        distance *= 2
    return StepList(ranks, ranks, tuple(rounds), 2 * ranks, output)


# -- rings: every rank sends only to the next one, so the load per link hardly depends on the number of ranks ----------
#
# Each part travels once around the ring to collect its sum, and the sums travel around once more. This is best for
# large sizes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). With
# two ways, half of each part travels one way, half the other. Full-duplex ports carry as much as with one ring. Links
# between neighbors, as on a torus, carry half as much.


def all_reduce_ring(ranks: int, directions: int = 1) -> StepList:
    """Reduce-scatter, then all-gather: 2(n-1) rounds, 2(n-1)/n of the size."""
    return StepList(ranks, directions * ranks, _reduce_rounds(ranks, directions) + _gather_rounds(ranks, directions))


def reduce_scatter_ring(ranks: int, directions: int = 1) -> StepList:
    """Go around the ring once: n-1 rounds, (n-1)/n of the size."""
    return StepList(ranks, directions * ranks, _reduce_rounds(ranks, directions))


def all_gather_ring(ranks: int, directions: int = 1) -> StepList:
    """Go around the ring once: n-1 rounds, (n-1)/n of the size."""
    return StepList(ranks, directions * ranks, _gather_rounds(ranks, directions))


def _reduce_rounds(ranks: int, directions: int) -> Rounds:
    """Part p starts at the rank after p and ends at p; with two ways, its second half starts on the other side."""
    return tuple(_shift(ranks, directions, 1 + number, adds=True) for number in range(ranks - 1))


def _gather_rounds(ranks: int, directions: int = 1) -> Rounds:
    """Part p starts at rank p and reaches all others."""
    return tuple(_shift(ranks, directions, number, adds=False) for number in range(ranks - 1))


def _shift(ranks: int, directions: int, offset: int, adds: bool) -> tuple[Move, ...]:
    """Pass on, at each rank, the part of the rank `offset` positions before it in the ring's direction."""
    moves = []
    for direction, step in enumerate((1, -1)[:directions]):
        for rank, target in _at_distance(ranks, step):
            slot = (rank - step * offset) % ranks * directions + direction
            moves.append(Move(rank, target, slot, 1, slot, adds))
    return merge_contiguous(moves)


# -- from the root to all, or from all to the root ---------------------------------------------------------------------


def broadcast_binomial(ranks: int) -> StepList:
    """Pass the data on at every rank that has them: ceil(log2 n) rounds of the whole size each."""
    rounds = (tuple(replace(move, first=0, count=1, into=0) for move in moves) for moves in _spread(ranks))
    return StepList(ranks, 1, tuple(rounds))


def broadcast_scattered(ranks: int) -> StepList:
    """Scatter by a binomial tree, then gather by a ring: ceil(log2 n) + n-1 rounds, about twice the size.

    (Barnett, Shuler, Gupta, Payne, van de Geijn and Watts, "Building a high-performance collective communication
    library", 1994.)
    """
    return StepList(ranks, ranks, _spread(ranks) + _gather_rounds(ranks))


def broadcast_chain(ranks: int) -> StepList:
    """Send from rank to rank, piece by piece: n-2 + k rounds of 1/k of the size each, for k pieces."""
    rounds = tuple(
        tuple(Move(hop, hop + 1, n - hop, 1, n - hop) for hop in range(ranks - 1) if 0 <= n - hop < PIECES)
        for n in range(ranks - 2 + PIECES)
    )
    return StepList(ranks, PIECES, rounds)


def reduce_binomial(ranks: int) -> StepList:
    """Reverse a binomial broadcast, adding: ceil(log2 n) rounds of the whole size each."""
    return StepList(ranks, 1, mirror(broadcast_binomial(ranks).rounds, adds=True))


def reduce_chain(ranks: int) -> StepList:
    """Send from the last rank to the root, piece by piece, each rank adding its own: n-2 + k rounds of 1/k of the
    size."""
    return StepList(ranks, PIECES, mirror(broadcast_chain(ranks).rounds, adds=True))


def scatter_binomial(ranks: int) -> StepList:
    """Pass on half of what a rank holds in each round: ceil(log2 n) rounds, (n-1)/n of the size out of the root."""
    return StepList(ranks, ranks, _spread(ranks))


def gather_binomial(ranks: int) -> StepList:
    """Pass on what each rank has gathered: ceil(log2 n) rounds, (n-1)/n of the size into the root."""
    return StepList(ranks, ranks, mirror(_spread(ranks)))


def _spread(ranks: int) -> Rounds:
    """Rank r receives its own part and those of the ranks below it in the tree."""
    rounds, reach = [], 1 << (ranks - 1).bit_length()
    while reach > 1:
        half = reach // 2
        firsts = [(rank, rank + half, min(rank + reach, ranks)) for rank in range(0, ranks - half, reach)]
        rounds.append(tuple(Move(rank, first, first, end - first, first) for rank, first, end in firsts))
        reach = half
    return tuple(rounds)


# -- recursive halving and doubling: partners at distance n/2, n/4, ... 1 exchange what the other needs ----------------
#
# This takes log2 n rounds each way. A number of ranks that is not a power of two is folded: in each of the first pairs,
# the even rank gives all of its data to the odd one, sits out the exchange, and receives the result at the end (Thakur,
# Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).


class _Fold:
    """The 2^k ranks that take part in the exchange, `core`, and `pairs`: (rank that sits out, its partner in it)."""

    def __init__(self, ranks: int) -> None:
        extra = ranks - (1 << (ranks.bit_length() - 1))
        self.pairs = [(2 * index, 2 * index + 1) for index in range(extra)]
        self.core = (*(odd for _, odd in self.pairs), *range(2 * extra, ranks))

    def bounds(self) -> tuple[int, ...]:
        """Return where each core member's parts begin, and where the last ends; a member of a pair has two parts."""
        extra = len(self.pairs)
        return tuple(2 * index if index < extra else index + extra for index in range(len(self.core) + 1))

    def enter(self, chunks: int) -> Rounds:
        """Return the round that adds the data of the ranks outside the core to that of their partners."""
        return _round(Move(out, core, 0, chunks, 0, adds=True) for out, core in self.pairs)

    def leave(self, chunks: int) -> Rounds:
        """Return the round that sends the whole result to the ranks outside the core."""
        return _round(Move(core, out, 0, chunks, 0) for out, core in self.pairs)


def _round(moves: Iterable[Move]) -> Rounds:
    """Build one round; none if there is nothing to send."""
    messages = tuple(moves)
    return (messages,) if messages else ()


def all_reduce_halving_doubling(ranks: int) -> StepList:
    """Halving, then doubling: 2 log2 n rounds, 2(n-1)/n of the size.

    If n is not a power of two, folding adds 2 rounds and twice the size.
    """
    fold = _Fold(ranks)
    chunks = len(fold.core)
    halving = _halving_rounds(fold.core, range(chunks + 1))
    return StepList(ranks, chunks, fold.enter(chunks) + halving + mirror(halving) + fold.leave(chunks))


def all_reduce_doubling(ranks: int) -> StepList:
    """Exchange all data between partners: log2 n rounds of the whole size each, for sizes at which latency
    dominates."""
    fold = _Fold(ranks)
    rounds, distance = fold.enter(1), 1
    while distance < len(fold.core):
        partners = [(rank, fold.core[index ^ distance]) for index, rank in enumerate(fold.core)]
        rounds += (tuple(Move(rank, partner, 0, 1, 0, adds=True) for rank, partner in partners),)
        distance *= 2
    return StepList(ranks, 1, rounds + fold.leave(1))


def reduce_scatter_halving(ranks: int) -> StepList:
    """Halving: log2 n rounds, (n-1)/n of the size.

    If n is not a power of two, folding adds 2 rounds and about (n+1)/n of the size.
    """
    fold = _Fold(ranks)
    last = _round(Move(core, out, out, 1, out) for out, core in fold.pairs)
    return StepList(ranks, ranks, fold.enter(ranks) + _halving_rounds(fold.core, fold.bounds()) + last)


def all_gather_doubling(ranks: int) -> StepList:
    """Reverse the halving."""
    fold = _Fold(ranks)
    first = _round(Move(out, core, out, 1, out) for out, core in fold.pairs)
    return StepList(ranks, ranks, first + mirror(_halving_rounds(fold.core, fold.bounds())) + fold.leave(ranks))


def _halving_rounds(core: Sequence[int], bounds: Sequence[int]) -> Rounds:
    """Halve: each core member ends with the sums of its own parts, [bounds[place], bounds[place + 1])."""
    rounds, distance = [], len(core) // 2
    while distance:
        moves = []
        for index, rank in enumerate(core):
            partner = index ^ distance
            begin = partner - partner % distance  # the first member on the partner's side from now on
            first, count = bounds[begin], bounds[begin + distance] - bounds[begin]
            moves.append(Move(rank, core[partner], first, count, first, adds=True))
        rounds.append(tuple(moves))
        distance //= 2
    return tuple(rounds)


# -- a double binary tree, each tree carrying half of the data: an inner rank of one tree is a leaf of the other -------
#
# This way no port is idle, whereas half of the ports are idle in a single tree, and the latency grows only with log n
# (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).
#
#     n = 6, first tree      4th rank is its root      the second is its mirror image, or, for an odd n, the same
#              3             (in order, so leaves are  tree shifted by one rank
#            /   \           at 0, 2, 4)
#           1     5
#          / \   /
#         0   2 4


def all_reduce_tree(ranks: int) -> StepList:
    """Send sums up the trees and results down, piece by piece: 2h + k - 1 rounds for trees of height h, k pieces per
    half."""
    height = ranks.bit_length() - 1
    rounds: list[list[Move]] = [[] for _ in range(2 * height + PIECES - 1)]
    for half, tree in enumerate(double_tree(ranks)):
        for rank, parent, depth in edges(tree):
            for piece in range(PIECES):
                slot = half * PIECES + piece
                rounds[piece + height - depth].append(Move(rank, parent, slot, 1, slot, adds=True))
                rounds[piece + height + depth - 1].append(Move(parent, rank, slot, 1, slot))
    return StepList(ranks, 2 * PIECES, tuple(tuple(sorted(moves)) for moves in rounds))


def double_tree(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both trees: the parent of each rank; the root is its own parent."""
    tree = tuple(_parent(index + 1, ranks) - 1 for index in range(ranks))
    if ranks % 2:
        return tree, tuple((tree[(rank - 1) % ranks] + 1) % ranks for rank in range(ranks))
    return tree, tuple(ranks - 1 - parent for parent in reversed(tree))


def _parent(number: int, count: int) -> int:
    """Return the parent in the in-order tree of 1..count, where a number's lowest set bit is its height.

    All odd numbers are therefore leaves.
    """
    bit = number & -number
    above = (number ^ bit) | (bit << 1)
    return above if above <= count else (number ^ bit) or number


def edges(tree: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each rank but the root, its parent, and its depth."""
    for rank, parent in enumerate(tree):
        depth, ancestor = 0, rank
        while tree[ancestor] != ancestor:
            ancestor, depth = tree[ancestor], depth + 1
        if depth:
            yield rank, parent, depth
