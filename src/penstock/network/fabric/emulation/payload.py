"""The payload: small integers, so that sums are exact in any order and type, and every result can be checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.network.fabric.steps import GATHERS, IN_PARTS, Collective
from penstock.network.fabric.workload import BYTES, Op, Transfer

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BYTES}
"""torch dtypes by name."""

NOTHING = 77
"""Fills buffers that hold no input; no rank contributes it to a sum."""

_EXACT_TO = {torch.int8: 127, torch.uint8: 255, torch.bfloat16: 256, torch.float16: 2048}
"""Integers up to this are exact, and so are all sums up to it."""


def contribution(rank: int, ranks: int, elements: int, seed: int, dtype: torch.dtype, op: Op = "sum") -> Tensor:
    """Return what a rank contributes: pseudorandom integers that differ by rank and position, as exactness permits.

    For a sum, no rank contributes 0 if the type has room. For the other ops, one rank decides each position; ranks take
    turns in a varying order. For a product or an average, only that rank contributes more than 1 or 0, so the result is
    exact in any type; for a minimum or a maximum, it contributes the extreme value.
    """
    position = torch.arange(elements, dtype=torch.int64)
    room = _EXACT_TO.get(dtype, 2**24) // ranks
    hashed = _hash(_hash(position + 0x9E3779B9 * (seed & 0x7FFFFFFF)) + 0x85EBCA6B * (rank + 1))
    drawn = hashed % min(13, room) + 1 if room > 1 else hashed % 2
    decided_here = (position + _hash(position // ranks + 0x9E3779B9 * (seed & 0x7FFFFFFF))) % ranks == rank
    match op:
        case "sum":
            values = drawn
        case "min":
            values = torch.where(decided_here, drawn, drawn + 13)
        case "max":
            values = torch.where(decided_here, drawn + 13, drawn)
        case "prod" | "avg":
            values = torch.where(decided_here, 2 ** (hashed % 3) * (ranks if op == "avg" else 2), int(op == "prod"))
    return values.to(dtype)


def _hash(number: Tensor) -> Tensor:
    """Hash each number to an unrelated 31-bit number, with products that fit into 64 bits."""
    number = number & 0x7FFFFFFF
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B & 0x7FFFFFFF
    return (number >> 16) ^ number


@dataclass(frozen=True, slots=True)
class Participant:
    """A rank's place in a transfer.

    Attributes:
        members: the job's ranks that take part.
        rank: this rank's index in `members`.
        elements: the size of the largest buffer, before any padding.
        seed, dtype, op: of the payload.
    """

    transfer: Transfer
    members: tuple[int, ...]
    rank: int
    elements: int
    seed: int
    dtype: torch.dtype
    op: Op = "sum"

    @property
    def collective(self) -> Collective:
        return self.transfer.collective

    @property
    def ranks(self) -> int:
        return len(self.members)

    @property
    def has_result(self) -> bool:
        last = {"gather": 0, "reduce": 0, "send": 1}.get(self.collective, self.rank)
        return self.rank == last

    def part(self, elements: int) -> slice:
        """Return the position of this rank's part in a buffer that is divided among the ranks."""
        shares = self.transfer.shares or (1,) * self.ranks
        unit = elements // sum(shares)
        return slice(sum(shares[: self.rank]) * unit, sum(shares[: self.rank + 1]) * unit)

    def padded(self, elements: int) -> int:
        """Round `elements` up to a multiple of the ranks if the collective divides them among the ranks."""
        return -(-elements // self.ranks) * self.ranks if self.collective in IN_PARTS else elements

    def initial_buffer(self, elements: int) -> Tensor:
        """Return this rank's buffer before the collective, `NOTHING` where it has no input; `elements` is a multiple of
        the ranks if it is divided among them."""
        buffer = torch.full((elements,), NOTHING, dtype=self.dtype)
        if self.collective in GATHERS:
            buffer[self.part(elements)] = self._contribution(self.rank, elements // self.ranks)
        elif self.rank == 0 or self.collective not in ("broadcast", "scatter", "send"):
            buffer = self._contribution(self.rank, elements)
        return buffer

    def expected(self, elements: int) -> Tensor | None:
        """Return this rank's result for a payload of `elements` elements; None if it has none."""
        if not self.has_result:
            return None
        everyone, own_part = range(self.ranks), self.part(elements)
        match self.collective:
            case "all_reduce" | "reduce_scatter" | "reduce":
                total = self._contribution(0, elements)
                for rank in everyone[1:]:
                    reduce_into(total, self._contribution(rank, elements), self.op)
                if self.op == "avg":
                    total /= self.ranks
                return total[own_part] if self.collective == "reduce_scatter" else total
            case "all_gather" | "gather":
                return torch.cat([self._contribution(rank, elements // self.ranks) for rank in everyone])
            case "all_to_all":
                return torch.cat([self._contribution(rank, elements)[own_part] for rank in everyone])
            case "scatter":
                return self._contribution(0, elements)[own_part]
            case "sendrecv":
                return self._contribution((self.rank - 1) % self.ranks, elements)
        return self._contribution(0, elements)

    def _contribution(self, rank: int, elements: int) -> Tensor:
        return contribution(rank, self.ranks, elements, self.seed, self.dtype, self.op)


def reduce_into(total: Tensor, values: Tensor, op: Op) -> None:
    """Reduce `values` into `total` in place. For an average, this adds only; the caller divides."""
    reduce = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    reduce(total, values, out=total)
