"""What the page asks: numbers and names out of an address, each within bounds, so that no question eats the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.schedule import MICROBATCHES, ScheduleSpec, schedule_spec
from penstock.schedule.generators import ScheduleParams

MAX_SIZES = {"ranks": 64, "microbatches": 512, "chunks": 8}
MAX_ACTIONS = 300_000
"""Of all schedules of one answer together, three of 64 ranks and 512 microbatches: seconds of work, and 15 MB."""
MAX_CELLS = 12_000
"""Slots times ranks of a walk-through."""
MAX_TO_SEARCH = 6_000
MAX_SECONDS = 10.0
"""Of a search."""
_LARGEST = 1e6
"""Of a cost: larger ones are the same question in another unit."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate. Costs are for one microbatch on one rank, divided evenly among its chunks, so that every
    schedule trains the same model.

    Attributes:
        schedules: their names.
        chunks: stages per rank, for schedules that can have so many; None: each schedule's usual number.
        forward, backward_input, backward_weight: F, I and W.
        comm: how long a message between two ranks takes.
        head: how much more the model's last stage does, as a share of a rank's F, I and W: a large output layer.
        memory_limit: the most activations that a rank may hold; 1 is one microbatch on all its stages.

    Raises:
        ArgumentError: a number is out of bounds, a name unknown, or there is too much to answer.
    """

    schedules: tuple[str, ...] = ("gpipe", "1f1b", "zb-h1")
    ranks: int = 4
    microbatches: int = MICROBATCHES
    chunks: int | None = None
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0
    head: float = 0.0
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        for name, most in MAX_SIZES.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ArgumentError(f"{name}={value}: the studio takes 1 to {most}; `penstock simulate` takes more")
        for name in ("forward", "backward_input", "backward_weight", "comm", "head"):
            value = getattr(self, name)
            if not 0 <= value <= _LARGEST:
                raise ArgumentError(f"{name}={value:g}: expected a number from 0 to {_LARGEST:,.0f}")
        if not self.forward + self.backward_input + self.backward_weight:
            raise ArgumentError("forward, backward_input and backward_weight are all 0: make one of them longer")
        if self.memory_limit is not None and not 1 <= self.memory_limit <= _LARGEST:
            raise ArgumentError(f"memory_limit={self.memory_limit:g}: a single microbatch needs 1; pass a number >= 1")
        entries = self.entries()
        found = sum(entry.actions(self.numbers(entry)) for entry in entries)
        if found > MAX_ACTIONS:
            raise ArgumentError(
                f"{self.size}: {counted(len(entries), 'schedule')} of this size: {found:,} actions, and the studio "
                f"shows {MAX_ACTIONS:,}; take fewer, or use `penstock simulate`"
            )

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Question:
        """Parse the query in an address. Raise ArgumentError if a name is unknown or a value has the wrong type."""
        if unknown := sorted(given.keys() - _READ.keys()):
            raise ArgumentError(f"unknown parameter {unknown[0]!r}; expected one of {', '.join(_READ)}")
        return cls(**{name: _READ[name](name, text) for name, text in given.items() if text})

    @property
    def size(self) -> str:
        """`4 ranks and 8 microbatches`."""
        return f"{counted(self.ranks, 'rank')} and {counted(self.microbatches, 'microbatch')}"

    def entries(self) -> list[ScheduleSpec]:
        """Return the schedules, without duplicates. Raise ArgumentError if one is unknown."""
        return [schedule_spec(name) for name in dict.fromkeys(self.schedules)]

    def numbers(self, entry: ScheduleSpec) -> ScheduleParams:
        """Return the parameters for a schedule: with its usual stages per rank, if it does not support the requested
        number."""
        usual = ScheduleParams(self.ranks, self.microbatches, entry.chunks)
        if self.chunks is None:
            return usual
        asked = ScheduleParams(self.ranks, self.microbatches, self.chunks)
        broken = entry.violated_constraint(asked)
        return usual if broken is not None and broken.argument == "stages_per_rank" else asked


def whole(name: str, text: str) -> int:
    """Parse an integer from an address. Raise ArgumentError if it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ArgumentError(f"{name}={text[:40]!r}: expected an integer, such as 4")
    return int(text)


def number(name: str, text: str) -> float:
    """Parse a finite number from an address. Raise ArgumentError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"{name}={text[:40]!r}: expected a number, such as 1.5")
    return value


def _names(name: str, text: str) -> tuple[str, ...]:
    found = tuple(part.strip()[:_LONGEST_NAME] for part in text.split(",") if part.strip())
    if len(found) > _ALL_AT_MOST:
        raise ArgumentError(f"{name}: expected at most {_ALL_AT_MOST} names")
    return found


_ALL_AT_MOST = 32
_LONGEST_NAME = 40  # no schedule has one; what is longer is cut, so that errors stay short
_READ: Mapping[str, Callable[[str, str], Any]] = {
    **{one.name: number for one in fields(Question)},
    **dict.fromkeys(MAX_SIZES, whole),
    "schedules": _names,
}
