"""Limits on the work of a verb: refuses what would exhaust memory, and announces what takes a while."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

from penstock.errors import ArgumentError
from penstock.schedule import Generator
from penstock.schedule.generators import Numbers

MOST = 20_000_000
"""The most actions that a verb makes and times: about 1 GiB of memory, and seconds (minutes without numba)."""

MOST_TO_SEARCH = 1_000_000
"""The most actions in a search, which tries them in many orders."""

MOST_STAGES = 10_000
"""The most stages of any schedule: finding each rank's among all of them takes quadratic time."""

ANNOUNCED = 200_000
"""From this many actions on, an answer takes seconds."""


def weigh(schedules: Iterable[tuple[Generator, Numbers]]) -> None:
    """Refuses schedules that are too large to time, and announces those that take a while. Raises ArgumentError: they
    have more than `MOST` actions together, or one has more than `MOST_STAGES` stages."""
    asked = list(schedules)
    found = sum(generator.actions(numbers) for generator, numbers in asked)
    if found > MOST:
        given = max(asked, key=lambda one: one[0].actions(one[1]))[1]
        raise ArgumentError(
            f"--ranks {given.ranks} --microbatches {given.microbatches}: that makes {found:,} actions, but at most "
            f"{MOST:,} can be timed; give fewer ranks, microbatches, chunks or slices"
        )
    for _, numbers in asked:
        _refuse_stages(numbers.ranks, numbers.chunks)
    announce(found)


def weigh_search(ranks: int, microbatches: int, chunks: int, seconds: float) -> None:
    """Like `weigh`, for a search."""
    found = 3 * ranks * chunks * microbatches
    if found > MOST_TO_SEARCH:
        raise ArgumentError(
            f"--ranks {ranks} --microbatches {microbatches}: a schedule has {found:,} actions, but at most "
            f"{MOST_TO_SEARCH:,} can be searched; give fewer ranks, microbatches or chunks"
        )
    _refuse_stages(ranks, chunks)
    if found > ANNOUNCED // 10 or seconds > _PATIENT_SECONDS:
        _say(f"searching for about {seconds:g} s, not counting the time that named schedules take")


_PATIENT_SECONDS = 10.0


def _refuse_stages(ranks: int, chunks: int) -> None:
    if ranks * chunks > MOST_STAGES:
        raise ArgumentError(
            f"--ranks {ranks}: with {chunks} a rank that makes {ranks * chunks:,} stages, but at most {MOST_STAGES:,} "
            "can be timed; give fewer ranks or chunks"
        )


def announce(actions: int) -> None:
    """Announces on stderr that timing this many actions takes a while, if it does."""
    if actions > ANNOUNCED:
        slow = "" if find_spec("numba") else "; numba makes it some times as quick (pip install 'penstock[simulate]')"
        _say(f"timing {actions:,} actions, which takes a while{slow}")


def _say(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
