"""Objects that blocks are given and that a stage cannot make anew for each microbatch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scaffolding.proofs import proven

WIDTH = 4

Make, Use = Callable[[], Any], Callable[[Any], Any]


class Counter(nn.Module):
    """A module that is none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0


class Closing:
    """No stage makes such an object anew: it cleans up after itself."""

    def __init__(self) -> None:
        self.count = 0.0

    def __del__(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.use(given)


class Model(nn.Module):
    def __init__(self, make: Make, use: Use, between: Use = id) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(use) for _ in range(2))
        self.make, self.between = make, between

    def forward(self, x: Tensor) -> Tensor:
        given = self.make()
        for block in self.blocks:
            x = block(x, given)
            self.between(given)
        return x


def reads(given: Any) -> float:
    places, table, generator, *others = given["all"]
    return float(len(places) + table.sum() + isinstance(generator, random.Random) + sum(one.count for one in others))


def test_what_is_only_read_is_passed_on() -> None:
    torch.manual_seed(0)
    model = Model(lambda: {"all": ({1, 2}, np.ones(2), random.Random(0), Counter(), Closing())}, reads)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    proven(model, x, y, ranks=2, microbatches=2, schedule="gpipe")


def test_the_generators_of_the_libraries_have_streams() -> None:
    """They are objects, too, and may be passed on (as scikit-learn's `check_random_state(None)` gives them)."""
    torch.manual_seed(0)
    generator = np.random.random_sample.__self__  # type: ignore[attr-defined]
    model = Model(lambda: generator, lambda given: float(given.rand()))
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    proven(model, x, y, ranks=2, microbatches=2, schedule="gpipe")
