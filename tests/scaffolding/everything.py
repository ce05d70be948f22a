"""One small model with everything that makes recomputation hard: dropout, batch norm, ties, skips, in-place updates."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import pipeline
from penstock._base.compat import FakeTensor
from penstock.schedule import activations
from scaffolding.models import squared_error
from scaffolding.small import batch

ROWS, WIDTH = 11, 9

everything_goes = mock.patch.object(activations, "NEAR", 0)
"""Wraps what runs with `offload=`: all activations go to the host, also those for which that makes no room."""


class Layer(nn.Module):
    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.selu_(self.norm(self.linear(x)))) + x


class Everything(nn.Module):
    """A weight used at both ends, a skip that reaches all stages, and values updated after a cut."""

    def __init__(self, layers: int = 8, *, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm=norm) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.layers[0](x)
        y = skip
        for layer in self.layers[1:]:
            y = layer(y)
            y = y * 0.75 + skip
            y += 0.25
            y.sin_()
        return F.linear(y, self.layers[0].linear.weight)


def everything(layers: int = 8, *, norm: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, a batch that does not divide evenly, and a target."""
    torch.manual_seed(0)
    return Everything(layers, norm=norm), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def inputs_alive(layers: int, ranks: int, **options: Any) -> list[int]:
    """How many of each layer's inputs are in memory when the last of four microbatches reaches the last layer."""
    model, (x, y) = nn.Sequential(*(Layer(norm=False) for _ in range(layers))), batch()
    inputs: list[tuple[int, StorageWeakRef]] = []
    found: list[list[int]] = []
    forwards = count(1)

    def look(_module: nn.Module, args: Any, _output: Any) -> None:
        if isinstance(args[0], FakeTensor):  # during recording
            return
        if next(forwards) != 4:
            return
        gc.collect()
        alive = [number for number, ref in inputs if not ref.expired()]
        found.append([alive.count(layer) for layer in range(layers)])

    def follow(number: int) -> Any:
        return lambda _, args: inputs.append((number, StorageWeakRef(args[0].untyped_storage())))

    with pipeline(model, (x,), schedule="gpipe", ranks=ranks, microbatches=4, loss=squared_error, **options) as pipe:
        for number in range(layers):
            model[number].linear.register_forward_pre_hook(follow(number))
        model[-1].register_forward_hook(look)
        pipe.step(x, target=y)
    return found[0]
