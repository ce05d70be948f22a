"""What a collective costs by its closed form (`algorithms.forms`), and what its bandwidth is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.fabric.algorithms import found
from penstock.fabric.algorithms.forms import Terms

PIECES = 8
"""The default number of pieces into which pipelined algorithms cut the data."""


_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives in which each rank already has its own part of the size."""


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int, pieces: int = PIECES) -> Terms:
    """Returns the cost of an algorithm.

    Args:
        collective, algorithm: names from `penstock.fabric.algorithms`.
        ranks: 2 or more.
        pieces: the number of pieces of the data, for tree and chain.

    Raises:
        ArgumentError: the algorithm is unknown, or a number is out of range.
    """
    return found(collective, algorithm, ranks, pieces)[1](ranks, pieces)


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Returns the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it.

    For an uneven all_to_all (see `Transfer`) it is the busiest port's factor, just as for an even one.
    """
    if shares:
        return max(max(sum(shares) - one, (ranks - 1) * one) for one in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _IN_PARTS else 1.0
