"""Refuses a forward's own seeds and generators if recorded calls would draw other numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from penstock.errors import PartitionError
from penstock.partition.obstacle import Obstacle

SEED = 0x2D1B6A0F93C5E847
"""A seed that no forward would set. The same for every recording, so that made-up values are too."""


class Seeds:
    """Watches torch's generators while a forward is recorded: a forward that seeds them wants particular numbers.

    Recorded draws come from keyed streams, which would give different ones.
    """

    def __init__(self) -> None:
        """Create this only where the generators' states are restored afterwards."""
        torch.default_generator.manual_seed(SEED)
        self.users: dict[int, tuple[object, str]] = {}  # each kept alive so that its id is not reused

    @property
    def were_set(self) -> bool:
        """Whether the forward seeds the generator, or has set its state."""
        return torch.default_generator.initial_seed() != SEED

    def check(self, drew: Collection[Any], here: str, scope: str) -> None:
        """Raises Obstacle if a recorded call drew after the forward had seeded the generator."""
        if drew and self.were_set:
            raise Obstacle(f"{here} draws random numbers after the forward has seeded torch's generator", scope)

    def check_generator(self, generator: object, unit: str, scope: str) -> None:
        """Raises PartitionError if operators outside the units, or in two of them, draw from a generator of their own.

        Args:
            generator: the generator that the operator was given, if any.
            unit: the unit that it runs in; empty outside the units.
            scope: the name of the module that it runs in.
        """
        if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
            return
        where = f"module {scope!r}" if scope else "the model's own forward"
        if not unit:
            raise Obstacle(f"{where} draws from a torch.Generator of its own, which stages cannot keep in step", scope)
        user = self.users.setdefault(id(generator), (generator, unit))[1]
        if user != unit:
            raise PartitionError(
                f"{where} draws from the same torch.Generator as {user!r}: on stages of their "
                "own they would draw in another order. Give each a generator of its own, or none"
            )
