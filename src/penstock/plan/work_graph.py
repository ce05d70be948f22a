"""A model as work, its order, and what moves between its parts: what there is to cut, without any torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

from penstock.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Work:
    """A part of a model that runs on one device.

    Attributes:
        seconds: its forward and backward for one microbatch.
        microbatch_bytes: what it holds for each microbatch in flight.
        fixed_bytes: what it holds all the time: parameters, gradients, the optimizer's state.

    Raises:
        ArgumentError: one of them is negative or not finite.
    """

    seconds: float
    microbatch_bytes: float = 0
    fixed_bytes: float = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _refuse_odd(f"Work.{field.name}", getattr(self, field.name))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that moves if not all of its ends are on one device.

    Attributes:
        ends: the works that make it and need it, by index.
        seconds: how long each device with some of its ends, but not all, is busy with it.

    Raises:
        ArgumentError: the time is negative or not finite.
    """

    ends: frozenset[int]
    seconds: float

    def __post_init__(self) -> None:
        _refuse_odd("Transfer.seconds", self.seconds)


@dataclass(frozen=True, slots=True)
class WorkGraph:
    """What is cut into stages.

    Attributes:
        works: the parts of the model.
        order: (a, b) for each b that must not be on an earlier device than a.
        transfers: what moves between devices.

    Raises:
        ArgumentError: an index is out of range.
    """

    works: tuple[Work, ...]
    order: tuple[tuple[int, int], ...]
    transfers: tuple[Transfer, ...] = ()

    def __post_init__(self) -> None:
        used = {*chain.from_iterable(self.order), *chain.from_iterable(t.ends for t in self.transfers)}
        odd = sorted(index for index in used if not 0 <= index < len(self.works))
        if odd:
            raise ArgumentError(f"there is no work {odd[0]}: the graph has {len(self.works)}, counted from 0")

    @classmethod
    def line(cls, works: Sequence[Work], seconds_between: Sequence[float] = ()) -> WorkGraph:
        """Works that follow each other, and how long it takes to move what each hands to the next.

        Raises:
            ArgumentError: not one transfer for each pair of neighbours.
        """
        pairs = [(index, index + 1) for index in range(len(works) - 1)]
        if seconds_between and len(seconds_between) != len(pairs):
            raise ArgumentError(
                f"{len(seconds_between)} transfers for {len(works)} works: give one for each pair of neighbours, "
                f"{len(pairs)}, or none"
            )
        transfers = [Transfer(frozenset(pair), s) for pair, s in zip(pairs, seconds_between, strict=False)]
        return cls(tuple(works), tuple(pairs), tuple(transfers))

    def topological(self) -> list[int]:
        """The works in an order that `order` allows: as listed, as far as possible.

        Raises:
            ArgumentError: there is none, since works wait for each other in a circle.
        """
        waits: list[set[int]] = [set() for _ in self.works]
        frees: list[list[int]] = [[] for _ in self.works]
        for a, b in set(self.order):
            if a != b:
                waits[b].add(a)
                frees[a].append(b)
        ready = [index for index, before in enumerate(waits) if not before]
        found = []
        while ready:
            index = heapq.heappop(ready)
            found.append(index)
            for after in frees[index]:
                waits[after].discard(index)
                if not waits[after]:
                    heapq.heappush(ready, after)
        if len(found) < len(self.works):
            stuck = next(index for index, before in enumerate(waits) if before)
            raise ArgumentError(f"work {stuck} must come before itself: `order` has a circle; make one work of it")
        return found


def _refuse_odd(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ArgumentError(f"{name}={value}: expected a number of 0 or more")
