"""The queries of the page: numbers and names from an address, each within bounds that keep the server responsive."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.schedule import MICROBATCHES, ScheduleSpec, schedule_spec
from penstock.schedule.generators import ScheduleParams

MAX_SIZES = {"ranks": 64, "microbatches": 512, "chunks": 8}
MAX_ACTIONS = 300_000
"""Maximum number of actions of all schedules of one answer, three of 64 ranks and 512 microbatches: seconds of work,
and 15 MB."""
MAX_CELLS = 12_000
"""Maximum number of slots times ranks of a walk-through."""
MAX_TO_SEARCH = 6_000
MAX_SECONDS = 10.0
"""Maximum duration of a search."""
_MAX_COST = 1e6
"""Maximum cost: larger ones are the same query in another unit."""


@dataclass(frozen=True, slots=True)
class SimulationQuery:
    """Parameters of a simulation. Costs are for one microbatch on one rank, divided evenly among its chunks, so that
    every schedule trains the same model.

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
        for name, limit in MAX_SIZES.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ArgumentError(f"{name}={value}: the studio takes 1 to {limit}; `penstock simulate` takes more")
        for name in ("forward", "backward_input", "backward_weight", "comm", "head"):
            value = getattr(self, name)
            if not 0 <= value <= _MAX_COST:
                raise ArgumentError(f"{name}={value:g}: expected a number from 0 to {_MAX_COST:,.0f}")
        if not self.forward + self.backward_input + self.backward_weight:
            raise ArgumentError("forward, backward_input and backward_weight are all 0: make one of them longer")
        if self.memory_limit is not None and not 1 <= self.memory_limit <= _MAX_COST:
            raise ArgumentError(f"memory_limit={self.memory_limit:g}: a single microbatch needs 1; pass a number >= 1")
        specs = self.entries()
        actions = sum(spec.actions(self.numbers(spec)) for spec in specs)
        if actions > MAX_ACTIONS:
            raise ArgumentError(
                f"{self.size}: {pluralize(len(specs), 'schedule')} of this size: {actions:,} actions, and the studio "
                f"shows {MAX_ACTIONS:,}; take fewer, or use `penstock simulate`"
            )

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SimulationQuery:
        """Parse the query in an address. Raise ArgumentError if a name is unknown or a value has the wrong type."""
        if unknown := sorted(parameters.keys() - _PARSERS.keys()):
            raise ArgumentError(f"unknown parameter {unknown[0]!r}; expected one of {', '.join(_PARSERS)}")
        return cls(**{name: _PARSERS[name](name, text) for name, text in parameters.items() if text})

    @property
    def size(self) -> str:
        """`4 ranks and 8 microbatches`."""
        return f"{pluralize(self.ranks, 'rank')} and {pluralize(self.microbatches, 'microbatch')}"

    def entries(self) -> list[ScheduleSpec]:
        """Return the schedules, without duplicates. Raise ArgumentError if one is unknown."""
        return [schedule_spec(name) for name in dict.fromkeys(self.schedules)]

    def numbers(self, spec: ScheduleSpec) -> ScheduleParams:
        """Return the parameters for a schedule: with its usual stages per rank, if it does not support the requested
        number."""
        usual = ScheduleParams(self.ranks, self.microbatches, spec.chunks)
        if self.chunks is None:
            return usual
        requested = ScheduleParams(self.ranks, self.microbatches, self.chunks)
        violated = spec.violated_constraint(requested)
        return usual if violated is not None and violated.argument == "stages_per_rank" else requested


def parse_integer(name: str, text: str) -> int:
    """Parse an integer from an address. Raise ArgumentError if it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ArgumentError(f"{name}={text[:40]!r}: expected an integer, such as 4")
    return int(text)


def parse_number(name: str, text: str) -> float:
    """Parse a finite number from an address. Raise ArgumentError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"{name}={text[:40]!r}: expected a number, such as 1.5")
    return value


def _parse_names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip()[:_MAX_NAME_LENGTH] for part in text.split(",") if part.strip())
    if len(names) > _MAX_NAMES:
        raise ArgumentError(f"{name}: expected at most {_MAX_NAMES} names")
    return names


_MAX_NAMES = 32
_MAX_NAME_LENGTH = 40  # longer names are cut, so that errors stay short
_PARSERS: Mapping[str, Callable[[str, str], Any]] = {
    **{field.name: parse_number for field in fields(SimulationQuery)},
    **dict.fromkeys(MAX_SIZES, parse_integer),
    "schedules": _parse_names,
}
