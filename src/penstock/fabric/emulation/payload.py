"""The payload: small integers, so that sums are exact in any order and type, and every result can be checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.fabric.steps import Collective
from penstock.fabric.workload import BYTES, REDUCES, Op

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BYTES}
"""torch dtypes by name."""

NOTHING = 77
"""Fills buffers that hold no input; no rank contributes it to a sum."""

_EXACT_TO = {torch.int8: 127, torch.uint8: 255, torch.bfloat16: 256, torch.float16: 2048}
"""Integers up to this are exact, and so are all sums up to it."""


def contribution(rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype, op: Op = "sum") -> Tensor:
    """Returns what a rank contributes: pseudorandom integers that differ by rank and position, as exactness permits.

    For a sum, no rank contributes 0 if the type has room. For the other ops, one rank decides each position; ranks take
    turns in a varying order. For a product or an average, only that rank contributes more than 1 or 0, so the result is
    exact in any type; for a minimum or a maximum, it contributes the extreme value.
    """
    place = torch.arange(elements, dtype=torch.int64)
    room = _EXACT_TO.get(dtype, 2**24) // ranks
    hashed = _mixed(_mixed(place + 0x9E3779B9 * (seed & 0x7FFFFFFF)) + 0x85EBCA6B * (rank + 1))
    drawn = hashed % min(13, room) + 1 if room > 1 else hashed % 2
    decides = (place + _mixed(place // ranks + 0x9E3779B9 * (seed & 0x7FFFFFFF))) % ranks == rank
    match op:
        case "sum":
            made = drawn
        case "min":
            made = torch.where(decides, drawn, drawn + 13)
        case "max":
            made = torch.where(decides, drawn + 13, drawn)
        case "prod" | "avg":
            made = torch.where(decides, 2 ** (hashed % 3) * (ranks if op == "avg" else 2), int(op == "prod"))
    return made.to(dtype)


def _mixed(number: Tensor) -> Tensor:
    """Hashes each number to an unrelated 31-bit number, with products that fit into 64 bits."""
    number = number & 0x7FFFFFFF
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B & 0x7FFFFFFF
    return (number >> 16) ^ number


def given(
    collective: Collective, rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype, op: Op = "sum"
) -> Tensor:
    """Returns a rank's buffer before the collective; `elements` is a multiple of `ranks` if it is divided among them.

    Positions for which the rank has no input are `NOTHING`.
    """
    nothing = torch.full((elements,), NOTHING, dtype=dtype)
    if collective in ("all_gather", "gather"):
        part = elements // ranks
        nothing[rank * part : (rank + 1) * part] = contribution(rank, ranks, part, seed, dtype)
        return nothing
    if collective in ("broadcast", "scatter", "send") and rank != 0:
        return nothing
    return contribution(rank, ranks, elements, seed, dtype, op if collective in REDUCES else "sum")


def expected(
    collective: Collective,
    rank: int,
    ranks: int,
    elements: int,
    seed: int,
    dtype: torch.dtype,
    op: Op = "sum",
    shares: Sequence[int] = (),
) -> Tensor | None:
    """Returns a rank's result; None if it has none. `shares` are those of an uneven all_to_all; see `Transfer`."""
    part = elements // ranks

    def of(other: int, count: int = elements) -> Tensor:
        return contribution(other, ranks, count, seed, dtype, op if collective in REDUCES else "sum")

    if collective in ("all_reduce", "reduce_scatter") or (collective == "reduce" and rank == 0):
        total = of(0)
        for other in range(1, ranks):
            reduce_into(total, of(other), op)
        if op == "avg":
            total /= ranks
        return total[rank * part : (rank + 1) * part] if collective == "reduce_scatter" else total
    if collective == "all_gather" or (collective == "gather" and rank == 0):
        return torch.cat([of(other, part) for other in range(ranks)])
    if collective == "all_to_all":
        mine = own_part(rank, ranks, elements, shares)
        return torch.cat([of(other)[mine] for other in range(ranks)])
    if collective == "scatter":
        return of(0)[rank * part : (rank + 1) * part]
    if collective == "sendrecv":
        return of((rank - 1) % ranks)
    if collective == "broadcast" or (collective == "send" and rank == 1):
        return of(0)
    return None


def reduce_into(total: Tensor, more: Tensor, op: Op) -> None:
    """Reduces `more` into `total` in place. For an average, this adds only; the caller divides."""
    match op:
        case "sum" | "avg":
            total.add_(more)
        case "prod":
            total.mul_(more)
        case "min":
            torch.minimum(total, more, out=total)
        case "max":
            torch.maximum(total, more, out=total)


def own_part(rank: int, ranks: int, elements: int, shares: Sequence[int]) -> slice:
    """Returns the position of a rank's part in a buffer that is divided among the ranks."""
    shares = shares or (1,) * ranks
    unit = elements // sum(shares)
    return slice(sum(shares[:rank]) * unit, sum(shares[: rank + 1]) * unit)


def padded(collective: Collective, elements: int, ranks: int) -> int:
    """Rounds `elements` up to a multiple of `ranks` if the collective divides them among the ranks."""
    divides = collective in ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
    return -(-elements // ranks) * ranks if divides else elements
