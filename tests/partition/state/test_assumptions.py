"""What a recording takes as given and a user changes between steps, and what a recording would lose.

More changes: tests/runtime/step/test_changes_between_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import pipeline
from penstock.partition.state.assumptions import Assumptions

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.factor = nn.ModuleList(Block() for _ in range(4)), torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.scale
        return torch.tanh(x * self.factor)


def plain_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    for x_k, y_k in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(model(x_k.clone()), y_k) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def first_of(held: Any) -> float:
    return float(held[0])


def set_first(held: Any) -> Any:
    held[0] = 3.0
    return held


@dataclass(slots=True)
class Slots:
    value: float = 1.0

    def once(self) -> float:
        return self.value

    def thrice(self) -> float:
        return 3 * self.value


def set_value(held: Slots) -> Slots:
    held.value = 3.0
    return held


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], float]]] = {
    "a list": (lambda: [1.0] * 9, set_first, first_of),
    "an array": (lambda: np.ones(9), set_first, first_of),
    "a set": (lambda: {0, 1}, lambda held: held.discard(0) or held, lambda held: 1.0 if 0 in held else 3.0),
    "slots": (Slots, set_value, Slots.once),
    "a partial": (lambda: partial(float, 1.0), lambda _: partial(float, 3.0), lambda held: held()),
    "a bound method": (lambda: Slots().once, lambda held: held.__self__.thrice, lambda held: held()),
    "a method of another object": (lambda: Slots().once, lambda _: Slots(3.0).once, lambda held: held()),
    "a sign of zero": (lambda: 0.0, lambda _: -0.0, lambda held: 1.0 if math.copysign(1, held) > 0 else 3.0),
}


class Reading(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.blocks, self.held, self.read = nn.ModuleList(Block() for _ in range(2)), held, read

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.read(self.held)
        return x


@pytest.mark.parametrize("name", HELD)
def test_what_an_attribute_holds_may_change(name: str) -> None:
    make, change, read = HELD[name]
    model, x, y = Reading(make(), read), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with pipeline(model, (x,), loss=F.mse_loss, ranks=2, schedule="gpipe", microbatches=2) as pipe:
        pipe.step(x, target=y)
        model.zero_grad()
        model.held = change(model.held)
        pipe.step(x, target=y)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert read(model.held) == 3.0
    expected = plain_gradients(model, x, y)
    assert all(map(torch.equal, gradients, expected.values()))


def test_an_empty_place_among_layers_is_no_change() -> None:
    """x-transformers keeps `[norm before, norm between, norm after]` for each layer, with None where there is none."""
    model, x, y = Model(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    model.norms = nn.ModuleList([nn.LayerNorm(WIDTH), None])  # type: ignore[list-item]
    with pipeline(model, (x,), loss=F.mse_loss, ranks=2, microbatches=2) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        assert len(list(pipe.session.bound_schedules)) == 1


def test_objects_that_take_the_place_of_others_in_memory_are_told_apart() -> None:
    model = Model()
    given = Assumptions({"": model})
    seen = set()
    for value in range(20):
        model.factor = torch.tensor(float(value))  # often where the one before it was
        seen.add(given.read())
    assert len(seen) == 20
