"""Closed-form costs of algorithms, for any number of ranks: the rounds, and the part of the size that crosses a port.

The latter is the sum over all rounds of the largest message that any rank sends or receives. Sizes are nccl-tests': the
size of a rank's largest buffer. n is the number of ranks; p is the largest power of two that is at most n. The formulas
follow Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, unless
another source is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.errors import ArgumentError
from penstock.fabric.algorithms.tree import double_tree

PIECES = 8
"""The default number of pieces into which pipelined algorithms cut the data."""


_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives in which each rank already has its own part of the size."""


class Terms(NamedTuple):
    """The coefficients of an algorithm's cost: seconds = rounds * alpha + bytes * bytes_factor * beta."""

    rounds: int
    bytes_factor: float


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int, pieces: int = PIECES) -> Terms:
    """Returns the cost of an algorithm.

    Args:
        collective, algorithm: names from `penstock.fabric.algorithms`.
        ranks: 2 or more.
        pieces: the number of pieces of the data, for tree and chain.

    Raises:
        ArgumentError: the algorithm is unknown or has no closed form, or a number is out of range.
    """
    known = known_algorithms(collective)
    if algorithm not in known:
        raise ArgumentError(f"{algorithm!r} has no closed form for {collective}: expected one of {', '.join(known)}")
    if ranks < 2 or pieces < 1:
        raise ArgumentError(f"ranks={ranks}, pieces={pieces}: expected 2 ranks or more, and 1 piece or more")
    return _FORMS[collective][algorithm](ranks, pieces)


def known_algorithms(collective: str) -> tuple[str, ...]:
    """Returns the algorithms with a closed form. Raises ArgumentError for an unknown collective."""
    if collective not in _FORMS:
        raise ArgumentError(f"{collective!r} is not a collective: expected one of {', '.join(_FORMS)}")
    return tuple(_FORMS[collective])


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Returns the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it.

    For an uneven all_to_all (see `Transfer`) it is the busiest port's factor, just as for an even one.
    """
    if shares:
        return max(max(sum(shares) - one, (ranks - 1) * one) for one in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _IN_PARTS else 1.0


def _fold(n: int) -> tuple[int, int]:
    """Returns p, and the number of ranks beyond it."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def _log(n: int) -> int:
    """Returns log2 n, rounded up."""
    return (n - 1).bit_length()


def _around(n: int, _: int) -> Terms:
    """Rings and pairwise exchange: n-1 rounds of one part each (Patarasuk and Yuan, 2009)."""
    return Terms(n - 1, (n - 1) / n)


def _twice_around(n: int, _: int) -> Terms:
    return Terms(2 * (n - 1), 2 * (n - 1) / n)


def _at_once(n: int, _: int) -> Terms:
    return Terms(1, (n - 1) / n)


def _log_rounds(n: int, _: int) -> Terms:
    """Bruck's all-gather and binomial gather: the number of parts doubles each round."""
    return Terms(_log(n), (n - 1) / n)


def _halving_doubling(n: int, _: int) -> Terms:
    """Rabenseifner's algorithm; if n is not a power of two, folding sends the whole size in, and out again."""
    p, extra = _fold(n)
    fold = 2 if extra else 0
    return Terms(2 * _log(p) + fold, 2 * (p - 1) / p + fold)


def _recursive_doubling(n: int, _: int) -> Terms:
    p, extra = _fold(n)
    rounds = _log(p) + (2 if extra else 0)
    return Terms(rounds, rounds)


def _halving(n: int, _: int) -> Terms:
    """Reduce-scatter by halving, or all-gather by doubling.

    After folding, the first members of the core have two parts each; the busiest block of d members has d + min(extra,
    d).
    """
    p, extra = _fold(n)
    parts = sum((1 << k) + min(extra, 1 << k) for k in range(_log(p)))
    return Terms(_log(p) + 2, (parts + n + 1) / n) if extra else Terms(_log(p), parts / n)


def _all_to_all_bruck(n: int, _: int) -> Terms:
    """Round k sends the parts whose distance has bit k set (Bruck and others, 1997)."""
    distances = np.arange(n)
    return Terms(_log(n), sum(int(((distances >> k) & 1).sum()) for k in range(_log(n))) / n)


def _binomial(n: int, _: int) -> Terms:
    return Terms(_log(n), _log(n))


def _scatter_allgather(n: int, _: int) -> Terms:
    """Van de Geijn's algorithm (Barnett and others, 1994): a binomial scatter, then a ring."""
    return Terms(_log(n) + n - 1, 2 * (n - 1) / n)


def _chain(n: int, k: int) -> Terms:
    return Terms(n - 2 + k, (n - 2 + k) / k)


def _tree(n: int, k: int) -> Terms:
    """The double binary tree (Sanders, Speck and Träff, 2009), with k pieces per half: 2h + k - 1 rounds.

    h is floor(log2 n), the height. With four or more ranks and enough pieces, a port carries four of the 2k pieces in
    most rounds, but fewer in the first and last ones, so the busiest port of each round is counted. On an edge at depth
    d, sums go up from round h - d on, and results come down from round h + d - 1 on.
    """
    height = n.bit_length() - 1
    changes = np.zeros((2, 2 * height + k, n), int)  # in what each port sends and receives, by round
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
