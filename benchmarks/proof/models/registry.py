"""What each model of the table consists of: how it is made, what it is trained on, and under which schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS, MICROBATCHES, STEPS = 6, 8, 4, 4

ORDERED, SPLIT, BOTH_WAYS = ("1f1b",), ("1f1b", "zb-h1"), ("1f1b", "dualpipe")
"""What a case runs under: also where backwards are cut in two, or where microbatches enter from both ends."""


@dataclass(frozen=True)
class Case:
    """A model that would train wrongly in some pipeline if nobody watched; a few that only look like it.

    Attributes:
        make: returns the model and its loss.
        scales: what the inputs of the four steps are multiplied by; the first is that of the proof.
        draws: it draws random numbers, so that the truth is a pipeline of one rank with the same streams.
        ties: some gradients are sums over stages, which the truth compares within rounding.
        integers: its inputs are.
    """

    name: str
    kind: str
    make: Callable[[], tuple[nn.Module, Any]]
    schedules: tuple[str, ...] = ORDERED
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    draws: bool = False
    ties: bool = False
    integers: bool = False

    def batch(self, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and the target of a step, from 0."""
        generator = torch.Generator().manual_seed(100 + step)
        if self.integers:
            ids = torch.randint(0, 9, (ROWS, WIDTH), generator=generator)
            return (ids,), torch.randn(ROWS, WIDTH, WIDTH, generator=generator)
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        return (x * self.scales[step],), y


CASES: dict[str, Case] = {}


def model(kind: str, *given: Any, name: str = "", loss: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """Adds a case: a class of models, which takes `given`. `loss` makes its loss of the model; None: mean squared."""

    def add(made: Any) -> Any:
        def make() -> tuple[nn.Module, Any]:
            torch.manual_seed(0)
            built = made(*given)
            return built, F.mse_loss if loss is None else loss(built)

        key = name or made.__name__
        assert key not in CASES, key
        CASES[key] = Case(key, kind, make, **options)
        return made

    return add


def blocks(kind: str, *given: Any, count: int = 4, name: str = "", **options: Any) -> Any:
    """Adds a case: as many blocks of a class, one after the other."""

    def add(made: Any) -> Any:
        chain = lambda: nn.Sequential(*(made(*given) for _ in range(count)))  # noqa: E731
        model(kind, name=name or made.__name__, **options)(chain)
        return made

    return add


class Layered(nn.Module):
    """Four layers; what derives from it does something before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)
