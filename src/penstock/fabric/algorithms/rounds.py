"""What the families share: rounds, put together tidily, and the checks of their options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.errors import ArgumentError
from penstock.fabric.steps import Move

Rounds = tuple[tuple[Move, ...], ...]


def joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """A round's moves in order; those whose slots follow one another on both sides become one."""
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
    """Into how many pieces the data of a pipeline is cut. Raises ArgumentError unless it is 1 or more."""
    if pieces < 1:
        raise ArgumentError(f"pieces is {pieces}: cut the data into 1 or more")
    return pieces


def mirrored(rounds: Rounds) -> Rounds:
    """Last round first, each message the other way: how data was spread is how it is gathered."""
    return tuple(
        tuple(Move(move.target, move.source, move.into, move.count, move.first) for move in moves)
        for moves in reversed(rounds)
    )
