"""How much there is to make and time: too much is refused before memory is gone, and what takes a while is said."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from penstock.errors import ArgumentError
from penstock.schedule import Generator
from penstock.schedule.generators import Numbers

MOST = 10_000_000
"""Actions that a verb makes and times: about 2 GiB of memory, and minutes."""

MOST_TO_SEARCH = 1_000_000
"""Actions of a schedule that is searched for: they are tried in many orders."""

MOST_STAGES = 10_000
"""Of any schedule: where each rank's are is looked up among all of them, so that time grows with the square."""

ANNOUNCED = 200_000
"""From so many actions on, seconds go by without an answer."""


def actions(generator: Generator, numbers: Numbers) -> int:
    """How many F, B, I and W a schedule has, at most: one that splits backwards may leave some whole."""
    kinds = 3 if generator.splits else 2
    return kinds * numbers.ranks * numbers.chunks * numbers.microbatches * numbers.slices


def weigh(schedules: Iterable[tuple[Generator, Numbers]]) -> None:
    """Refuses what is too much to time, and announces what takes a while.

    Raises:
        ArgumentError: it has more than `MOST` actions, or one more than `MOST_STAGES` stages.
    """
    asked = list(schedules)
    found = sum(actions(generator, numbers) for generator, numbers in asked)
    if found > MOST:
        given = asked[0][1]
        raise ArgumentError(
            f"--ranks {given.ranks} --microbatches {given.microbatches}: that makes {found:,} actions, and at most "
            f"{MOST:,} are timed; give fewer ranks, microbatches, chunks or slices"
        )
    for _, numbers in asked:
        _refuse_stages(numbers.ranks, numbers.chunks)
    announce(found)


def weigh_search(ranks: int, microbatches: int, chunks: int, seconds: float) -> None:
    """As `weigh`, for a search."""
    found = 3 * ranks * chunks * microbatches
    if found > MOST_TO_SEARCH:
        raise ArgumentError(
            f"--ranks {ranks} --microbatches {microbatches}: a schedule has {found:,} actions, and at most "
            f"{MOST_TO_SEARCH:,} are searched; give fewer ranks, microbatches or chunks"
        )
    _refuse_stages(ranks, chunks)
    if found > ANNOUNCED // 10 or seconds > _PATIENT_SECONDS:
        _say(f"searching for about {seconds:g} s, besides the time that schedules with a name take")


_PATIENT_SECONDS = 10.0


def _refuse_stages(ranks: int, chunks: int) -> None:
    if ranks * chunks > MOST_STAGES:
        raise ArgumentError(
            f"--ranks {ranks}: with {chunks} a rank that makes {ranks * chunks:,} stages, and at most {MOST_STAGES:,} "
            "are timed; give fewer ranks or chunks"
        )


def announce(actions: int) -> None:
    """Says so, on stderr, where it takes a while until so many actions are timed."""
    if actions > ANNOUNCED:
        _say(f"timing {actions:,} actions, which takes a while")


def _say(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
