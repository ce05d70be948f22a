"""What is sent: small whole numbers, so that sums are exact in any order and type, and each result can be checked."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.fabric.steps import Collective

DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""By the bytes of an element."""

NOTHING = 77
"""What no rank gives."""

_MOST = {torch.uint8: 255, torch.float16: 2048, torch.float32: 2**24, torch.float64: 2**24}
"""Whole numbers up to here, and so all sums, are exact."""


def contribution(rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives: element i differs from its neighbours and from other ranks' i, as far as sums stay exact."""
    values = max(2, min(13, _MOST[dtype] // ranks + 1))
    place = torch.arange(elements, dtype=torch.int64)
    return ((place * 7 + rank * 5 + seed) % values).to(dtype)


def given(collective: Collective, rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The buffer of a rank before the collective; `elements` is a multiple of `ranks` where it is divided among them.

    What a rank has no input for is `NOTHING`.
    """
    nothing = torch.full((elements,), NOTHING, dtype=dtype)
    if collective in ("all_gather", "gather"):
        part = elements // ranks
        nothing[rank * part : (rank + 1) * part] = contribution(rank, ranks, part, seed, dtype)
        return nothing
    if collective in ("broadcast", "send") and rank != 0:
        return nothing
    return contribution(rank, ranks, elements, seed, dtype)


def expected(
    collective: Collective, rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype
) -> Tensor | None:
    """The result of a rank; None if it has none."""
    part = elements // ranks

    def of(other: int, count: int = elements) -> Tensor:
        return contribution(other, ranks, count, seed, dtype)

    if collective in ("all_reduce", "reduce_scatter"):
        total = sum((of(other) for other in range(ranks)), torch.zeros(elements, dtype=dtype))
        return total if collective == "all_reduce" else total[rank * part : (rank + 1) * part]
    if collective == "all_gather" or (collective == "gather" and rank == 0):
        return torch.cat([of(other, part) for other in range(ranks)])
    if collective == "all_to_all":
        return torch.cat([of(other)[rank * part : (rank + 1) * part] for other in range(ranks)])
    if collective == "broadcast" or (collective == "send" and rank == 1):
        return of(0)
    return None


def padded(collective: Collective, elements: int, ranks: int, chunks: int = 1) -> int:
    """Elements that divide among the ranks, where they have to, and into chunks: no fewer than given."""
    unit = chunks
    if collective in ("all_gather", "gather", "reduce_scatter", "all_to_all") and chunks % ranks:
        unit = chunks * ranks
    return -(-elements // unit) * unit
