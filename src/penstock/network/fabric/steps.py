"""A collective as a list of steps: who sends which slots to whom in which round. Pure data, for any number of ranks.

Each rank has a memory of equal slots. In each round, messages carry what the slots held before the round, and arriving
data is stored after all messages of the round have been sent. A rank can therefore send a slot and receive into it in
the same round.

    slots of a ring all-reduce over 3 ranks, the sums in brackets:

    rank 0   a0 b0 c0       a0 b0 [c0+c2]       a0 [b0+b2+b1] ...
    rank 1   a1 b1 c1  ->   [a1+a0] b1 c1  ->   ...
    rank 2   a2 b2 c2       a2 [b2+b1] c2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

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
"""The collectives, by torch.distributed's names.

"send" is point-to-point, from rank 0 to rank 1. "sendrecv" is nccl-tests': every rank sends to the next one and
receives from the previous one, so two ranks send to each other at once.
"""

REDUCES = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives that take a reduction op."""
IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives that divide the size among the ranks."""
GATHERS = ("all_gather", "gather")
"""Collectives whose size is the result's, of which each rank contributes a part."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Collectives for which torch.distributed has one buffer."""

PIECES = 8
"""Into how many pieces pipelined algorithms cut the data: more fill the ports better, but take more rounds."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One message: `source` sends its slots [first, first + count), and `target` stores them from slot `into` on.

    Attributes:
        adds: if True, the target adds them to its own values; otherwise they replace these.
    """

    source: int
    target: int
    first: int
    count: int
    into: int
    adds: bool = False


Rounds = tuple[tuple[Move, ...], ...]
"""The messages of each round."""


@dataclass(frozen=True, slots=True)
class StepList:
    """The steps by which ranks perform a collective.

    Attributes:
        ranks: the number of participants, numbered 0..ranks-1. The root is rank 0.
        chunks: the number of equal chunks into which the collective's bytes (the size of a rank's largest buffer, as in
            nccl-tests) are divided, the last one padded. A slot holds one chunk.
        rounds: the messages of each round.
        more_slots: how many slots each rank's memory has besides one per chunk. A rank's input, if it has any, is in
            slots 0..chunks-1.
        output: the first slot of the result, which is stored in order from there.
        shares: for an uneven all_to_all, the number of chunks that go to each rank; empty if all get the same number.
    """

    ranks: int
    chunks: int
    rounds: Rounds
    more_slots: int = 0
    output: int = 0
    shares: tuple[int, ...] = ()

    def slot_bytes(self, size_bytes: int, element_bytes: int = 1) -> int:
        """Return the bytes of one slot for a collective of `size_bytes`, rounded up to whole elements."""
        elements = -(-size_bytes // element_bytes)
        return -(-elements // self.chunks) * element_bytes


def merge_contiguous(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return a round's moves in order, merging moves whose slots are contiguous on both sides."""
    merged: list[Move] = []
    for move in sorted(moves):
        last = merged[-1] if merged else None
        continued = last and replace(last, first=last.first + last.count, into=last.into + last.count, count=move.count)
        if last and continued == move:
            merged[-1] = replace(last, count=last.count + move.count)
        else:
            merged.append(move)
    return tuple(merged)


def mirror(rounds: Rounds, *, adds: bool = False) -> Rounds:
    """Reverse the rounds and each message's direction: data is gathered the way it was spread."""
    return tuple(
        tuple(Move(move.target, move.source, move.into, move.count, move.first, adds) for move in moves)
        for moves in reversed(rounds)
    )


# -- what a list of steps requires of a rank, and what it costs --------------------------------------------------------


class Terms(NamedTuple):
    """The coefficients of an algorithm's cost: seconds = rounds * alpha + bytes * bytes_factor * beta."""

    rounds: int
    bytes_factor: float


class RankRound(NamedTuple):
    """What one rank does in one round: it posts all sends and receives, and continues when all are complete.

    Messages between the same two ranks in a round are in the same order on both sides.
    """

    number: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


def rank_rounds(steps: StepList, rank: int) -> tuple[RankRound, ...]:
    """Return the rounds in which a rank does something, with their numbers in the list.

    No barrier is needed between rounds. A rank's data changes only by what it receives, and both sides of a pair
    process their messages in the same order, so a rank that is ahead waits only for the messages that it needs.
    """
    rounds = []
    for number, moves in enumerate(steps.rounds):
        sends = tuple(move for move in moves if move.source == rank)
        receives = tuple(move for move in moves if move.target == rank)
        if sends or receives:
            rounds.append(RankRound(number, sends, receives))
    return tuple(rounds)


def slots_by_port(moves: Iterable[Move]) -> Counter[tuple[int, bool]]:
    """Return how many slots pass each rank's port, out of it (True) and into it (False)."""
    slots: Counter[tuple[int, bool]] = Counter()
    for move in moves:
        slots[move.source, True] += move.count
        slots[move.target, False] += move.count
    return slots


def cost(steps: StepList) -> Terms:
    """Return the number of rounds, and the total fraction of the size that passes each round's busiest rank.

    Links are full duplex: the larger of what a rank sends and what it receives in a round counts.
    """
    slots = sum(max(slots_by_port(moves).values(), default=0) for moves in steps.rounds)
    return Terms(len(steps.rounds), slots / steps.chunks)


def is_even(steps: StepList) -> bool:
    """Whether each rank's port carries as much in total as the busiest ports of all rounds together."""
    passed = slots_by_port(chain.from_iterable(steps.rounds))
    busiest = round(cost(steps).bytes_factor * steps.chunks)
    return all(max(passed[rank, True], passed[rank, False]) == busiest for rank in range(steps.ranks))
