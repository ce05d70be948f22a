"""A model whose forward takes one of three ways, by what is in a mask, so that other values cross the cuts."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 5

PLAIN, MASKED, TWICE = 1, 0, 2
"""What the mask of a microbatch holds besides ones."""


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh())


class Branching(nn.Module):
    """Layers, one after the other.

    Where something is masked, the mask goes along, the first layer's result skips to the end, through a parameter that
    nothing else trains, and the last layer's weight is used other than in a product. With twos in the mask, the second
    layer runs twice, the input is added at the end, without a gradient, and the last dropout is called on two stages.
    """

    def __init__(self, layers: int, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.extra, self.end = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        if tied:
            self.extra.weight = self.layers[0].linear.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        masked, twice = bool((mask == MASKED).any()), bool((mask == TWICE).any())
        given = early = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                early = x
            if masked:
                x = x * mask[:, None]
            if twice and number == 1:
                x = self.end(layer(x))
        if masked:
            x = x + self.extra(early) + self.layers[-1].linear.weight.sum()  # type: ignore[operator, union-attr]
        return self.end(x + F.relu(given) if twice else x)


def cuts(stages: int) -> list[str]:
    """One layer on each stage."""
    return [f"layers.{number}" for number in range(1, stages)]


def batch_of(ways: tuple[int, ...], seed: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, mask and target of a batch whose microbatches, of `rows` rows each, take these ways."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(len(ways) * rows, WIDTH, generator=draw) for _ in range(2))
    return x, torch.tensor([[way, *[1] * (rows - 1)] for way in ways]).flatten(), y


def several_kinds(microbatches: int) -> list[tuple[int, ...]]:
    """The ways of each of some batches' microbatches: all kinds in one, two of them in another order, one alone."""
    around = itertools.cycle([MASKED, PLAIN, TWICE, PLAIN, MASKED])
    first = tuple(next(around) for _ in range(microbatches))
    return [first, first[::-1], (PLAIN,) * microbatches, first]
