"""What a message sends into `leaf_modules=` works there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import inspect
from penstock._base.errors import PartitionError
from scaffolding.models import OneLayer
from scaffolding.proofs import proven

WIDTH = 6


class Expands(OneLayer):
    """Takes and returns tensors, some strides of which are 0, and reads values."""

    def forward(self, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if token.sum() > 1e9:
            x = x * 2
        return self.layer(x + token[:, :1]).expand(-1, 4, -1), token.expand(-1, 4, -1)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), Expands(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), 4, WIDTH)
        y, z = self.second(token, self.first(x))
        return self.last(y) + z + token


class Weighs(nn.Module):
    """Has a buffer that requires a gradient, and reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH).requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum() < 1e9 else x


class Overwrites(nn.Module):
    """Updates what it is given in place, and reads values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.sum() < 1e9 else x


class Around(nn.Module):
    """Linear layers around something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


@pytest.mark.parametrize(
    ("make", "x", "y"),
    [
        (Expanded, torch.zeros(3, 1, WIDTH), torch.randn(3, 4, WIDTH)),
        (lambda: Around(Weighs()), torch.randn(3, WIDTH), torch.randn(3, WIDTH)),
        (lambda: Around(Overwrites()), torch.randn(3, WIDTH), torch.randn(3, WIDTH)),
    ],
    ids=["expanded", "buffer with a gradient", "update in place"],
)
def test_the_remedy_that_the_message_gives_works(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> None:
    torch.manual_seed(0)
    with pytest.raises(PartitionError, match=r"leaf_modules=\['second'\]"):
        inspect(make(), (x,), stages=3)
    options = {"ranks": 3, "microbatches": 3, "cuts": ["second", "last"], "leaf_modules": ["second"]}
    proven(make(), x, y, exact=True, **options)


def test_a_buffer_with_a_gradient_on_two_stages_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    scale = torch.randn(WIDTH).requires_grad_()
    for layer in model:
        layer.register_buffer("scale", scale)
        layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight) * layer.scale
    with pytest.raises(PartitionError, match=r"'0\.scale' is a buffer that requires a gradient, .* stages \[0, 1\]"):
        inspect(model, (torch.randn(3, WIDTH),), stages=2)


class Residual(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return x + self.layer(x)


def test_a_leaf_is_not_opened_for_the_blocks_that_it_holds() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Residual(4) for _ in range(4))))
    found = inspect(model, (torch.randn(2, 4),), stages=2, leaf_modules=["1"])
    assert [stage.modules for stage in found.stages] == [("0",), ("1",)]
    with pytest.raises(PartitionError, match="2 layers"):
        inspect(model, (torch.randn(2, 4),), stages=3, leaf_modules=["1"])
