"""Collective algorithms as functions of the number of ranks: the registry of their names, and their costs.

Costs are closed forms, for any number of ranks: the rounds, and the part of the size that crosses a port. The latter is
the sum over all rounds of the largest message that any rank sends or receives. Sizes are nccl-tests': the size of a
rank's largest buffer. n is the number of ranks; p is the largest power of two that is at most n. The formulas follow
Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, unless another
source is named.

The table in tests/network/fabric/test_collective_steps.py defines what each collective starts from and ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import get_args

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.formatting import did_you_mean
from penstock.network.fabric.algorithms import generators as make
from penstock.network.fabric.steps import IN_PARTS, PIECES, Collective, StepList, Terms

ENGINE = "engine"
"""The algorithm name for torch.distributed's own collectives, which have no step list."""

Cost = Callable[[int], Terms]
"""The cost of an algorithm for a number of ranks."""


def _fold(n: int) -> tuple[int, int]:
    """Return p, and the number of ranks beyond it."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def _log(n: int) -> int:
    """Return log2 n, rounded up."""
    return (n - 1).bit_length()


def _ring(n: int, passes: int = 1) -> Terms:
    """Return the terms of rings and pairwise exchange: n-1 rounds of one part each (Patarasuk and Yuan, 2009)."""
    return Terms(passes * (n - 1), passes * (n - 1) / n)


def _single_round(n: int) -> Terms:
    return Terms(1, (n - 1) / n)


def _log_rounds(n: int) -> Terms:
    """Bruck's all-gather and binomial gather: the number of parts doubles each round."""
    return Terms(_log(n), (n - 1) / n)


def _halving_doubling(n: int) -> Terms:
    """Rabenseifner's algorithm; if n is not a power of two, folding sends the whole size in, and out again."""
    p, extra = _fold(n)
    fold = 2 if extra else 0
    return Terms(2 * _log(p) + fold, 2 * (p - 1) / p + fold)


def _doubling(n: int) -> Terms:
    p, extra = _fold(n)
    rounds = _log(p) + (2 if extra else 0)
    return Terms(rounds, rounds)


def _halving(n: int) -> Terms:
    """Reduce-scatter by halving, or all-gather by doubling.

    After folding, the first members of the core have two parts each; the busiest block of d members has d + min(extra,
    d).
    """
    p, extra = _fold(n)
    parts = sum((1 << k) + min(extra, 1 << k) for k in range(_log(p)))
    return Terms(_log(p) + 2, (parts + n + 1) / n) if extra else Terms(_log(p), parts / n)


def _tree(n: int) -> Terms:
    """Return the terms of the double binary tree (Sanders, Speck and Träff, 2009), with k pieces per half: 2h + k - 1
    rounds.

    h is floor(log2 n), the height. With four or more ranks and enough pieces, a port carries four of the 2k pieces in
    most rounds, but fewer in the first and last ones, so the busiest port of each round is counted. On an edge at depth
    d, sums go up from round h - d on, and results come down from round h + d - 1 on.
    """
    height, k = n.bit_length() - 1, PIECES
    changes = np.zeros((2, 2 * height + k, n), int)  # in what each port sends and receives, by round
    for tree in make.double_tree(n):
        child, parent, depth = np.array([*make.edges(tree)]).T
        for start, source, target in ((height - depth, child, parent), (height + depth - 1, parent, child)):
            for side, port in enumerate((source, target)):
                np.add.at(changes[side], (start, port), 1)
                np.add.at(changes[side], (start + k, port), -1)
    slots = changes.cumsum(1).max((0, 2)).sum()
    return Terms(2 * height + k - 1, int(slots) / (2 * k))


def _binomial(n: int) -> Terms:
    return Terms(_log(n), _log(n))


def _chain(n: int) -> Terms:
    return Terms(n - 2 + PIECES, (n - 2 + PIECES) / PIECES)


_ALGORITHMS: dict[Collective, dict[str, tuple[Callable[..., StepList], Cost]]] = {
    "all_reduce": {
        "ring": (make.all_reduce_ring, partial(_ring, passes=2)),
        "ring2": (partial(make.all_reduce_ring, directions=2), partial(_ring, passes=2)),
        "halving-doubling": (make.all_reduce_halving_doubling, _halving_doubling),
        "recursive-doubling": (make.all_reduce_doubling, _doubling),
        "tree": (make.all_reduce_tree, _tree),
    },
    "all_gather": {
        "ring": (make.all_gather_ring, _ring),
        "ring2": (partial(make.all_gather_ring, directions=2), _ring),
        "recursive-doubling": (make.all_gather_doubling, _halving),
        "bruck": (make.all_gather_bruck, _log_rounds),
    },
    "reduce_scatter": {
        "ring": (make.reduce_scatter_ring, _ring),
        "ring2": (partial(make.reduce_scatter_ring, directions=2), _ring),
        "halving": (make.reduce_scatter_halving, _halving),
        "pairwise": (make.reduce_scatter_pairwise, _ring),
    },
    "all_to_all": {
        "pairwise": (make.all_to_all_pairwise, _ring),
        "direct": (make.all_to_all_direct, _single_round),
        # Round k sends the parts whose distance has bit k set (Bruck and others, 1997).
        "bruck": (make.all_to_all_bruck, lambda n: Terms(_log(n), sum(map(int.bit_count, range(n))) / n)),
    },
    "broadcast": {
        "binomial": (make.broadcast_binomial, _binomial),
        # Van de Geijn's (Barnett and others, 1994): a binomial scatter, then a ring.
        "scatter-allgather": (make.broadcast_scattered, lambda n: Terms(_log(n) + n - 1, 2 * (n - 1) / n)),
        "chain": (make.broadcast_chain, _chain),
    },
    "reduce": {"binomial": (make.reduce_binomial, _binomial), "chain": (make.reduce_chain, _chain)},
    "gather": {"direct": (make.gather_direct, _single_round), "binomial": (make.gather_binomial, _log_rounds)},
    "scatter": {"direct": (make.scatter_direct, _single_round), "binomial": (make.scatter_binomial, _log_rounds)},
    "sendrecv": {"direct": (make.sendrecv, lambda _: Terms(1, 1.0))},
    "send": {"direct": (make.send, lambda _: Terms(1, 1.0))},
}
"""The generator of each algorithm's steps, and its cost; a collective's default comes first."""


def algorithms(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms for a collective, the default first. Raise ArgumentError: the collective is
    unknown."""
    if collective not in _ALGORITHMS:
        names = get_args(Collective)
        raise ArgumentError(f"{collective!r} is not a collective: {_nearest(collective, names)}")
    return tuple(_ALGORITHMS[collective])


def or_default(collective: str, algorithm: str) -> str:
    """Return an algorithm, or a collective's default if it does not have this one."""
    names = algorithms(collective)
    return algorithm if algorithm in names else names[0]


def generate(collective: str, algorithm: str, ranks: int, shares: tuple[int, ...] = ()) -> StepList:
    """Generate the steps of a collective among two or more ranks; `shares`: of an uneven all_to_all, see `Transfer`.
    Raises ArgumentError: there is no such algorithm, or there are fewer than 2 ranks."""
    make_steps = _look_up(collective, algorithm, ranks)[0]
    return make_steps(ranks, shares) if shares else make_steps(ranks)


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int) -> Terms:
    """Return the cost of an algorithm among two or more ranks. Raise ArgumentError as `generate` does."""
    return _look_up(collective, algorithm, ranks)[1](ranks)


def _look_up(collective: str, algorithm: str, ranks: int) -> tuple[Callable[..., StepList], Cost]:
    names = algorithms(collective)
    if algorithm not in names:
        raise ArgumentError(f"{algorithm!r} is not an algorithm for {collective}: {_nearest(algorithm, names)}")
    if ranks < 2:
        raise ArgumentError(f"{collective} among {ranks} ranks: pass 2 or more")
    return _ALGORITHMS[collective][algorithm]  # type: ignore[index]  # `algorithms` has checked it


def _nearest(name: str, names: tuple[str, ...]) -> str:
    return f"{did_you_mean(name.lower(), names, 0.5)}expected one of {', '.join(names)}"


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it.

    For an uneven all_to_all (see `Transfer`) it is the busiest port's factor, just as for an even one.
    """
    if shares:
        return max(max(sum(shares) - share, (ranks - 1) * share) for share in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in IN_PARTS else 1.0
