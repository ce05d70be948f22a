"""What a list of steps requires of a rank: its moves in each round, and how many bytes it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from penstock.network.fabric.algorithms.forms import Terms
from penstock.network.fabric.steps import Move, StepList


class RankRound(NamedTuple):
    """What one rank does in one round: it posts all sends and receives, and continues when all are complete.

    Messages between the same two ranks in a round are in the same order on both sides.
    """

    number: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


def moves_of(steps: StepList, rank: int) -> tuple[RankRound, ...]:
    """Returns the rounds in which a rank does something, with their numbers in the list.

    No barrier is needed between rounds. A rank's data changes only by what it receives, and both sides of a pair
    process their messages in the same order, so a rank that is ahead waits only for the messages that it needs.
    """
    own = []
    for number, moves in enumerate(steps.rounds):
        sends = tuple(move for move in moves if move.source == rank)
        receives = tuple(move for move in moves if move.target == rank)
        if sends or receives:
            own.append(RankRound(number, sends, receives))
    return tuple(own)


def slots_by_port(moves: Iterable[Move]) -> Counter[tuple[int, bool]]:
    """Returns how many slots pass each rank's port, out of it (True) and into it (False)."""
    slots: Counter[tuple[int, bool]] = Counter()
    for move in moves:
        slots[move.source, True] += move.count
        slots[move.target, False] += move.count
    return slots


def cost(steps: StepList) -> Terms:
    """Returns the number of rounds, and the total fraction of the size that passes each round's busiest rank.

    Links are full duplex: the larger of what a rank sends and what it receives in a round counts.
    """
    slots = sum(max(slots_by_port(moves).values(), default=0) for moves in steps.rounds)
    return Terms(len(steps.rounds), slots / steps.chunks)


def is_even(steps: StepList) -> bool:
    """Whether each rank's port carries as much in total as the busiest ports of all rounds together."""
    passed = slots_by_port(chain.from_iterable(steps.rounds))
    busiest = round(cost(steps).bytes_factor * steps.chunks)
    return all(max(passed[rank, True], passed[rank, False]) == busiest for rank in range(steps.ranks))
