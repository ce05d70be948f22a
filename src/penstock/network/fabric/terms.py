"""What a collective costs by its closed form (`algorithms.forms`), and what its bandwidth is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.network.fabric.algorithms import found
from penstock.network.fabric.algorithms.forms import Terms

_IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives in which each rank already has its own part of the size."""


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int) -> Terms:
    """Returns the cost of an algorithm among two or more ranks. Raises ArgumentError as `algorithms.generate` does."""
    return found(collective, algorithm, ranks)[1](ranks)


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Returns the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it.

    For an uneven all_to_all (see `Transfer`) it is the busiest port's factor, just as for an even one.
    """
    if shares:
        return max(max(sum(shares) - one, (ranks - 1) * one) for one in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _IN_PARTS else 1.0
