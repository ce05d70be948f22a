"""Helpers shared by the algorithm families: tidy rounds, and checks of options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.errors import ArgumentError
from penstock.fabric.steps import Move

Rounds = tuple[tuple[Move, ...], ...]


def joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Returns a round's moves in order, merging moves whose slots are contiguous on both sides."""
    made: list[Move] = []
    for move in sorted(moves):
        last = made[-1] if made else None
        if last and _follows(last, move):
            made[-1] = replace(last, count=last.count + move.count)
        else:
            made.append(move)
    return tuple(made)


def _follows(last: Move, move: Move) -> bool:
    same = (last.source, last.target, last.adds) == (move.source, move.target, move.adds)
    return same and last.first + last.count == move.first and last.into + last.count == move.into


def checked_pieces(pieces: int) -> int:
    """Returns the number of pieces of a pipelined algorithm. Raises ArgumentError unless it is 1 or more."""
    if pieces < 1:
        raise ArgumentError(f"pieces is {pieces}: cut the data into 1 or more")
    return pieces


def mirrored(rounds: Rounds) -> Rounds:
    """Reverses the rounds and each message's direction: data is gathered the way it was spread."""
    return tuple(
        tuple(Move(move.target, move.source, move.into, move.count, move.first) for move in moves)
        for moves in reversed(rounds)
    )
