"""Closed forms: how many rounds an algorithm takes, and what part of the size passes a port, for any number of ranks.

Each is the sum over the rounds of the largest message that a rank sends or receives in the round. Sizes are
nccl-tests': of the largest buffer of a rank. n: ranks; p: the largest power of two in n.
(Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, unless another
source is named.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.errors import ArgumentError
from penstock.fabric.algorithms.tree import double_tree

PIECES = 8
"""Into how many the algorithms with a pipeline cut the data, unless another number is given."""


_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Of whose size a rank has a part already."""


class Terms(NamedTuple):
    """seconds = rounds * alpha + bytes * bytes_factor * beta."""

    rounds: int
    bytes_factor: float

    def seconds(self, size_bytes: float, alpha_seconds: float, beta_seconds_per_byte: float) -> float:
        """Of a collective of a size."""
        return self.rounds * alpha_seconds + size_bytes * self.bytes_factor * beta_seconds_per_byte


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int, pieces: int = PIECES) -> Terms:
    """What an algorithm costs.

    Args:
        collective, algorithm: by the names of `penstock.fabric.algorithms`.
        ranks: 2 or more.
        pieces: of the data, for tree and chain.

    Raises:
        ArgumentError: there is no such algorithm, or no closed form for it, or a number is out of range.
    """
    known = known_algorithms(collective)
    if algorithm not in known:
        raise ArgumentError(f"{algorithm!r} has no closed form for {collective}: known are {', '.join(known)}")
    if ranks < 2 or pieces < 1:
        raise ArgumentError(f"ranks={ranks}, pieces={pieces}: expected 2 ranks or more, and 1 piece or more")
    return _FORMS[collective][algorithm](ranks, pieces)


def known_algorithms(collective: str) -> tuple[str, ...]:
    """Those with a closed form. Raises ArgumentError for an unknown collective."""
    if collective not in _FORMS:
        raise ArgumentError(f"{collective!r} is not a collective: known are {', '.join(_FORMS)}")
    return tuple(_FORMS[collective])


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Bus bandwidth over algorithm bandwidth, by the nccl-tests convention.

    Of an uneven all_to_all (see `Transfer`) it is that of the busiest port, as of an even one.
    """
    if shares:
        return max(max(sum(shares) - one, (ranks - 1) * one) for one in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _IN_PARTS else 1.0


def _fold(n: int) -> tuple[int, int]:
    """p, and how many ranks are beyond it."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def _log(n: int) -> int:
    """log2 n, rounded up."""
    return (n - 1).bit_length()


def _around(n: int, _: int) -> Terms:
    """n-1 rounds of a part each: rings, pairwise exchange (Patarasuk and Yuan, 2009)."""
    return Terms(n - 1, (n - 1) / n)


def _twice_around(n: int, _: int) -> Terms:
    return Terms(2 * (n - 1), 2 * (n - 1) / n)


def _at_once(n: int, _: int) -> Terms:
    return Terms(1, (n - 1) / n)


def _log_rounds(n: int, _: int) -> Terms:
    """Bruck's all-gather, a binomial gather: parts double each round."""
    return Terms(_log(n), (n - 1) / n)


def _halving_doubling(n: int, _: int) -> Terms:
    """Rabenseifner's, folded where n is not a power of two: the whole size in, and out again."""
    p, extra = _fold(n)
    fold = 2 if extra else 0
    return Terms(2 * _log(p) + fold, 2 * (p - 1) / p + fold)


def _recursive_doubling(n: int, _: int) -> Terms:
    p, extra = _fold(n)
    rounds = _log(p) + (2 if extra else 0)
    return Terms(rounds, rounds)


def _halving(n: int, _: int) -> Terms:
    """Reduce-scatter by halving, or all-gather by doubling. Folded, the first members of the core have two parts each;
    the busiest block of d members holds d + min(extra, d) parts."""
    p, extra = _fold(n)
    parts = sum((1 << k) + min(extra, 1 << k) for k in range(_log(p)))
    return Terms(_log(p) + 2, (parts + n + 1) / n) if extra else Terms(_log(p), parts / n)


def _all_to_all_bruck(n: int, _: int) -> Terms:
    """In round k go the parts whose distance has the bit k (Bruck and others, 1997)."""
    distances = np.arange(n)
    return Terms(_log(n), sum(int(((distances >> k) & 1).sum()) for k in range(_log(n))) / n)


def _binomial(n: int, _: int) -> Terms:
    return Terms(_log(n), _log(n))


def _scatter_allgather(n: int, _: int) -> Terms:
    """Van de Geijn's (Barnett and others, 1994): a binomial scatter, then a ring."""
    return Terms(_log(n) + n - 1, 2 * (n - 1) / n)


def _chain(n: int, k: int) -> Terms:
    return Terms(n - 2 + k, (n - 2 + k) / k)


def _tree(n: int, k: int) -> Terms:
    """The double binary tree (Sanders, Speck and Träff, 2009), k pieces a half: 2h + k - 1 rounds, h = floor(log2 n).

    From four ranks and some pieces on a port carries four of the 2k pieces in most rounds; at both ends fewer, so the
    busiest port of each round is counted: of an edge at depth d, sums go up from round h - d on, and results come down
    from round h + d - 1 on.
    """
    height = n.bit_length() - 1
    changes = np.zeros((2, 2 * height + k, n), int)  # of what a port sends and receives, by round
    for tree in double_tree(n):
        parents, rank = np.array(tree), np.arange(n)
        depth, above = np.zeros(n, int), rank
        while np.any(moving := parents[above] != above):
            depth, above = depth + moving, parents[above]
        below = rank[parents != rank]
        parent, depth = parents[below], depth[below]
        for first, source, target in ((height - depth, below, parent), (height + depth - 1, parent, below)):
            for side, port in enumerate((source, target)):
                np.add.at(changes[side], (first, port), 1)
                np.add.at(changes[side], (first + k, port), -1)
    slots = changes.cumsum(1).max((0, 2)).sum()
    return Terms(2 * height + k - 1, int(slots) / (2 * k))


def _send(_: int, __: int) -> Terms:
    return Terms(1, 1.0)


_FORMS: dict[str, dict[str, Callable[[int, int], Terms]]] = {
    "all_reduce": {
        "ring": _twice_around,
        "ring2": _twice_around,
        "halving-doubling": _halving_doubling,
        "recursive-doubling": _recursive_doubling,
        "tree": _tree,
    },
    "all_gather": {"ring": _around, "ring2": _around, "recursive-doubling": _halving, "bruck": _log_rounds},
    "reduce_scatter": {"ring": _around, "ring2": _around, "halving": _halving, "pairwise": _around},
    "all_to_all": {"pairwise": _around, "direct": _at_once, "bruck": _all_to_all_bruck},
    "broadcast": {"binomial": _binomial, "scatter-allgather": _scatter_allgather, "chain": _chain},
    "reduce": {"binomial": _binomial, "chain": _chain},
    "gather": {"direct": _at_once, "binomial": _log_rounds},
    "scatter": {"direct": _at_once, "binomial": _log_rounds},
    "sendrecv": {"direct": _send},
    "send": {"direct": _send},
}
