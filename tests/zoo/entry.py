"""What a model of the zoo is: how to make it, with a batch, and what is particular about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scaffolding.models import Case

ROWS, MICROBATCHES = 5, 4
"""Of each batch: microbatches of 2, 1, 1 and 1 rows."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: builds the model, seeded, with a batch of `ROWS` rows; see `models.Case`.
        about: what is particular about it, in a few words.
        layers: into how many stages it can be cut at most; more are refused.
        tied: parameters that may be used on several stages.
        updates: the first buffer that a training forward updates; schedules with two copies refuse the model.
    """

    make: Callable[[], Case]
    about: str
    layers: int
    tied: tuple[str, ...] = ()
    updates: str | None = None

    @property
    def name(self) -> str:
        return self.make.__name__

    def case(self) -> Case:
        torch.manual_seed(0)
        return self.make()


def noise(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def tokens(length: int = 5, vocabulary: int = 23) -> Tensor:
    """Whole numbers from 4 on: smaller ones mean something special to some models."""
    return torch.randint(4, vocabulary, (ROWS, length))
