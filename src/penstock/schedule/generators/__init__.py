"""The schedules that go by a name, a family a file, and the registry of the names.

A generator is a pure function of the number of ranks, microbatches and chunks. It writes F, B, I and W only: messages
and reductions are added by passes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ArgumentError
from penstock.schedule.generators.gpipe import gpipe
from penstock.schedule.generators.naive import naive
from penstock.schedule.generators.one_f_one_b import one_f_one_b
from penstock.schedule.schedule import Schedule

__all__ = ["Generator", "generate", "generators", "gpipe", "naive", "names", "one_f_one_b"]


@dataclass(frozen=True, slots=True)
class Generator:
    """A schedule that goes by a name, and what to expect of it (p ranks, m microbatches, F and B a rank's times).

    Attributes:
        name: what `generate` knows it by.
        make: (ranks, microbatches, chunks) -> Schedule.
        rule: the order of work, in a line.
        memory: the largest number of microbatches whose activations rank r holds.
        bubble: the share of its time that a rank idles, where links cost nothing.
        chunks: the chunks a rank that it works for, as a rule for people; None if any number will do.
        allows: whether it works for a number of chunks.
    """

    name: str
    make: Callable[[int, int, int], Schedule]
    rule: str
    memory: str
    bubble: str
    chunks: str | None = None
    allows: Callable[[int], bool] = lambda chunks: True


_GENERATORS = {
    generator.name: generator
    for generator in (
        Generator(
            "naive",
            naive,
            rule="a microbatch goes all the way forward and back before the next one starts",
            memory="1",
            bubble="(p - 1)/p",
        ),
        Generator(
            "gpipe",
            gpipe,
            rule="all forwards, then all backwards",
            memory="m",
            bubble="(p - 1)/(m + p - 1)",
        ),
        Generator(
            "1f1b",
            lambda ranks, microbatches, chunks: one_f_one_b(ranks, microbatches),
            rule="p - 1 - r forwards, then a forward and a backward in turn, then the backwards left over",
            memory="min(p - r, m)",
            bubble="(p - 1)/(m + p - 1)",
            chunks="exactly 1 chunk a rank",
            allows=lambda chunks: chunks == 1,
        ),
    )
}


def names() -> tuple[str, ...]:
    """The names that `generate` knows."""
    return tuple(_GENERATORS)


def generators() -> tuple[Generator, ...]:
    """The registry, in the order of `names`."""
    return tuple(_GENERATORS.values())


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name, without messages.

    Args:
        name: one of `names()`.
        ranks: how many ranks, at least 1.
        microbatches: how many microbatches, at least 1; fewer than ranks is fine.
        chunks: how many stages each rank owns, at least 1.

    Raises:
        ArgumentError: the name is unknown, a number is less than 1, or the schedule has another rule for chunks.
    """
    generator = _GENERATORS.get(name)
    if generator is None:
        near = difflib.get_close_matches(name.lower(), _GENERATORS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ArgumentError(f"name={name!r} is no known schedule; {hint}known are {', '.join(_GENERATORS)}")
    for argument, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{argument}={value!r}: expected a whole number of at least 1")
    if not generator.allows(chunks):
        raise ArgumentError(f"chunks={chunks}: {name} works with {generator.chunks}; choose another number or schedule")
    return generator.make(ranks, microbatches, chunks)
