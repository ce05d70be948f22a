"""Closed-form costs of algorithms, for any number of ranks: the rounds, and the part of the size that crosses a port.

The latter is the sum over all rounds of the largest message that any rank sends or receives. Sizes are nccl-tests': the
size of a rank's largest buffer. n is the number of ranks; p is the largest power of two that is at most n. The formulas
follow Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, unless
another source is named.
"""

from __future__ import annotations

from penstock.network.fabric.steps import PIECES, Terms


def _fold(n: int) -> tuple[int, int]:
    """Returns p, and the number of ranks beyond it."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def _log(n: int) -> int:
    """Returns log2 n, rounded up."""
    return (n - 1).bit_length()


def around(n: int) -> Terms:
    """Rings and pairwise exchange: n-1 rounds of one part each (Patarasuk and Yuan, 2009)."""
    return Terms(n - 1, (n - 1) / n)


def twice_around(n: int) -> Terms:
    return Terms(2 * (n - 1), 2 * (n - 1) / n)


def at_once(n: int) -> Terms:
    return Terms(1, (n - 1) / n)


def log_rounds(n: int) -> Terms:
    """Bruck's all-gather and binomial gather: the number of parts doubles each round."""
    return Terms(_log(n), (n - 1) / n)


def halving_doubling(n: int) -> Terms:
    """Rabenseifner's algorithm; if n is not a power of two, folding sends the whole size in, and out again."""
    p, extra = _fold(n)
    fold = 2 if extra else 0
    return Terms(2 * _log(p) + fold, 2 * (p - 1) / p + fold)


def recursive_doubling(n: int) -> Terms:
    p, extra = _fold(n)
    rounds = _log(p) + (2 if extra else 0)
    return Terms(rounds, rounds)


def halving(n: int) -> Terms:
    """Reduce-scatter by halving, or all-gather by doubling.

    After folding, the first members of the core have two parts each; the busiest block of d members has d + min(extra,
    d).
    """
    p, extra = _fold(n)
    parts = sum((1 << k) + min(extra, 1 << k) for k in range(_log(p)))
    return Terms(_log(p) + 2, (parts + n + 1) / n) if extra else Terms(_log(p), parts / n)


def all_to_all_bruck(n: int) -> Terms:
    """Round k sends the parts whose distance has bit k set (Bruck and others, 1997)."""
    return Terms(_log(n), sum(map(int.bit_count, range(n))) / n)


def binomial(n: int) -> Terms:
    return Terms(_log(n), _log(n))


def scatter_allgather(n: int) -> Terms:
    """Van de Geijn's algorithm (Barnett and others, 1994): a binomial scatter, then a ring."""
    return Terms(_log(n) + n - 1, 2 * (n - 1) / n)


def chain(n: int) -> Terms:
    return Terms(n - 2 + PIECES, (n - 2 + PIECES) / PIECES)


def send(_: int) -> Terms:
    return Terms(1, 1.0)
