"""Collective algorithms as functions of the number of ranks: one family per file, and the registry of their names.

The table in tests/fabric/step_proof.py defines what each collective starts from and ends with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from penstock._base.words import did_you_mean
from penstock.errors import ArgumentError
from penstock.fabric.algorithms import bruck, direct, halving, ring, rooted, tree
from penstock.fabric.steps import Collective, StepList

ENGINE = "engine"
"""The algorithm name for torch.distributed's own collectives, which have no step list."""

_GENERATORS: dict[Collective, dict[str, Callable[..., StepList]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "ring2": ring.all_reduce_2,
        "halving-doubling": halving.all_reduce,
        "recursive-doubling": halving.all_reduce_whole,
        "tree": tree.all_reduce,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "ring2": ring.all_gather_2,
        "recursive-doubling": halving.all_gather,
        "bruck": bruck.all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "ring2": ring.reduce_scatter_2,
        "halving": halving.reduce_scatter,
        "pairwise": direct.reduce_scatter_pairwise,
    },
    "all_to_all": {
        "pairwise": direct.all_to_all_pairwise,
        "direct": direct.all_to_all,
        "bruck": bruck.all_to_all,
    },
    "broadcast": {
        "binomial": rooted.broadcast_binomial,
        "scatter-allgather": rooted.broadcast_scattered,
        "chain": rooted.broadcast_chain,
    },
    "reduce": {"binomial": rooted.reduce_binomial, "chain": rooted.reduce_chain},
    "gather": {"direct": direct.gather, "binomial": rooted.gather_binomial},
    "scatter": {"direct": direct.scatter, "binomial": rooted.scatter_binomial},
    "sendrecv": {"direct": direct.sendrecv},
    "send": {"direct": direct.send},
}


def algorithms(collective: str) -> tuple[str, ...]:
    """Returns the names of the algorithms for a collective, the default first.

    Raises:
        ArgumentError: the collective is unknown.
    """
    if collective not in _GENERATORS:
        known = get_args(Collective)
        raise ArgumentError(f"{collective!r} is not a collective: {_nearest(collective, known)}")
    return tuple(_GENERATORS[collective])


def generate(collective: str, algorithm: str, ranks: int, **options: Any) -> StepList:
    """Generates the steps of a collective among `ranks` ranks.

    Args:
        collective, algorithm: names; see `algorithms`.
        ranks: 2 or more.
        options: the algorithm's options; see its function.

    Raises:
        ArgumentError: the collective or algorithm is unknown, there are fewer than 2 ranks, or fewer than one piece.
    """
    known = algorithms(collective)
    if algorithm not in known:
        raise ArgumentError(f"{algorithm!r} is not an algorithm for {collective}: {_nearest(algorithm, known)}")
    if ranks < 2:
        raise ArgumentError(f"{collective} among {ranks} ranks: pass 2 or more")
    if options.get("pieces", 1) < 1:
        raise ArgumentError(f"pieces is {options['pieces']}: cut the data into 1 or more")
    return _GENERATORS[collective][algorithm](ranks, **options)  # type: ignore[index]  # `algorithms` has checked it


def _nearest(name: str, known: tuple[str, ...]) -> str:
    return f"{did_you_mean(name.lower(), known, 0.5)}expected one of {', '.join(known)}"
