"""Collective algorithms as functions of the number of ranks: one family per file, and the registry of their names.

The table in tests/network/fabric/step_proof.py defines what each collective starts from and ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, get_args

from penstock._base.errors import ArgumentError
from penstock._base.words import did_you_mean
from penstock.network.fabric.algorithms import bruck, direct, forms, halving, ring, rooted, tree
from penstock.network.fabric.steps import IN_PARTS, Collective, StepList, Terms

ENGINE = "engine"
"""The algorithm name for torch.distributed's own collectives, which have no step list."""

Algorithm = tuple[Callable[..., StepList], Callable[[int], Terms]]
"""What makes the steps, and the cost, for a number of ranks."""

_ALGORITHMS: dict[Collective, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": (ring.all_reduce, forms.twice_around),
        "ring2": (partial(ring.all_reduce, ways=2), forms.twice_around),
        "halving-doubling": (halving.all_reduce, forms.halving_doubling),
        "recursive-doubling": (halving.all_reduce_whole, forms.recursive_doubling),
        "tree": (tree.all_reduce, tree.all_reduce_terms),
    },
    "all_gather": {
        "ring": (ring.all_gather, forms.around),
        "ring2": (partial(ring.all_gather, ways=2), forms.around),
        "recursive-doubling": (halving.all_gather, forms.halving),
        "bruck": (bruck.all_gather, forms.log_rounds),
    },
    "reduce_scatter": {
        "ring": (ring.reduce_scatter, forms.around),
        "ring2": (partial(ring.reduce_scatter, ways=2), forms.around),
        "halving": (halving.reduce_scatter, forms.halving),
        "pairwise": (direct.reduce_scatter_pairwise, forms.around),
    },
    "all_to_all": {
        "pairwise": (direct.all_to_all_pairwise, forms.around),
        "direct": (direct.all_to_all, forms.at_once),
        "bruck": (bruck.all_to_all, forms.all_to_all_bruck),
    },
    "broadcast": {
        "binomial": (rooted.broadcast_binomial, forms.binomial),
        "scatter-allgather": (rooted.broadcast_scattered, forms.scatter_allgather),
        "chain": (rooted.broadcast_chain, forms.chain),
    },
    "reduce": {
        "binomial": (rooted.reduce_binomial, forms.binomial),
        "chain": (rooted.reduce_chain, forms.chain),
    },
    "gather": {
        "direct": (direct.gather, forms.at_once),
        "binomial": (rooted.gather_binomial, forms.log_rounds),
    },
    "scatter": {
        "direct": (direct.scatter, forms.at_once),
        "binomial": (rooted.scatter_binomial, forms.log_rounds),
    },
    "sendrecv": {
        "direct": (direct.sendrecv, forms.send),
    },
    "send": {
        "direct": (direct.send, forms.send),
    },
}


def algorithms(collective: str) -> tuple[str, ...]:
    """Returns the names of the algorithms for a collective, the default first. Raises ArgumentError: the collective is
    unknown."""
    if collective not in _ALGORITHMS:
        known = get_args(Collective)
        raise ArgumentError(f"{collective!r} is not a collective: {_nearest(collective, known)}")
    return tuple(_ALGORITHMS[collective])


def or_default(collective: str, algorithm: str) -> str:
    """Returns an algorithm, or a collective's default if it does not have this one."""
    known = algorithms(collective)
    return algorithm if algorithm in known else known[0]


def generate(collective: str, algorithm: str, ranks: int, **options: Any) -> StepList:
    """Generates the steps of a collective among two or more ranks; `options` are the algorithm's, see its function.
    Raises ArgumentError: there is no such algorithm, or there are fewer than 2 ranks."""
    return _found(collective, algorithm, ranks)[0](ranks, **options)


@lru_cache(maxsize=4096)
def closed_form(collective: str, algorithm: str, ranks: int) -> Terms:
    """Returns the cost of an algorithm among two or more ranks. Raises ArgumentError as `generate` does."""
    return _found(collective, algorithm, ranks)[1](ranks)


def _found(collective: str, algorithm: str, ranks: int) -> Algorithm:
    known = algorithms(collective)
    if algorithm not in known:
        raise ArgumentError(f"{algorithm!r} is not an algorithm for {collective}: {_nearest(algorithm, known)}")
    if ranks < 2:
        raise ArgumentError(f"{collective} among {ranks} ranks: pass 2 or more")
    return _ALGORITHMS[collective][algorithm]  # type: ignore[index]  # `algorithms` has checked it


def _nearest(name: str, known: tuple[str, ...]) -> str:
    return f"{did_you_mean(name.lower(), known, 0.5)}expected one of {', '.join(known)}"


def busbw_factor(collective: str, ranks: int, shares: Sequence[int] = ()) -> float:
    """Returns the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it.

    For an uneven all_to_all (see `Transfer`) it is the busiest port's factor, just as for an even one.
    """
    if shares:
        return max(max(sum(shares) - one, (ranks - 1) * one) for one in shares) / sum(shares)
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in IN_PARTS else 1.0
