"""A collective as a list of steps: who sends which slots to whom in which round. Pure data, for any number of ranks.

Each rank has a memory of equal slots. In a round every message reads what the slots held before the round; what
arrives is put down when all of the round's messages have left. So a rank may send a slot and receive into it at once.

    slots of a ring all-reduce over 3 ranks, the sums in brackets:

    rank 0   a0 b0 c0       a0 b0 [c0+c2]       a0 [b0+b2+b1] ...
    rank 1   a1 b1 c1  ->   [a1+a0] b1 c1  ->   ...
    rank 2   a2 b2 c2       a2 [b2+b1] c2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import ArgumentError

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
    "send",
]
"""By torch.distributed's names; "send" is point-to-point, from rank 0 to rank 1. "sendrecv" is nccl-tests': every rank
sends to the next and receives from the one before, so that two ranks send to each other at once."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One message: `source` sends its slots [first, first + count); `target` puts them from slot `into` on.

    Attributes:
        adds: the target adds them to what it has; otherwise they replace it.
    """

    source: int
    target: int
    first: int
    count: int
    into: int
    adds: bool = False


@dataclass(frozen=True, slots=True)
class StepList:
    """How `ranks` ranks do a collective.

    Attributes:
        collective, algorithm: what is done, and by which way.
        ranks: how many take part, 0..ranks-1. Roots are rank 0.
        chunks: into how many equal pieces the collective's bytes (nccl-tests' size: of the largest buffer of a rank)
            are divided, the last one padded. A slot has the size of one.
        slots: of the memory of each rank. The input lies in slots 0..chunks-1, where this rank has one.
        output: the first slot of the result, which lies in order from there.
        shares: of an uneven all_to_all, how many chunks go to each rank; empty: as many to all.
        rounds: the messages of each round.

    Raises:
        ArgumentError: a rank or slot is out of range, or a rank sends to itself.
    """

    collective: Collective
    algorithm: str
    ranks: int
    chunks: int
    slots: int
    rounds: tuple[tuple[Move, ...], ...]
    output: int = 0
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for number, moves in enumerate(self.rounds):
            for move in moves:
                if not (0 <= move.source < self.ranks and 0 <= move.target < self.ranks) or move.source == move.target:
                    raise ArgumentError(f"round {number}: {move} is not between two of {self.ranks} ranks")
                last = max(move.first, move.into) + move.count
                if move.count < 1 or min(move.first, move.into) < 0 or last > self.slots:
                    raise ArgumentError(f"round {number}: {move} is not within {self.slots} slots")

    def part(self, rank: int) -> range:
        """The chunks of a buffer that belong to a rank, where each has some."""
        shares = self.shares or (self.chunks // self.ranks,) * self.ranks
        first = sum(shares[:rank])
        return range(first, first + shares[rank])

    def slot_bytes(self, size_bytes: int, element_bytes: int = 1) -> int:
        """Of one slot, for a collective of a size: whole elements, rounded up."""
        elements = -(-size_bytes // element_bytes)
        return -(-elements // self.chunks) * element_bytes
