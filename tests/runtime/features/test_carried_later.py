"""What a block begins to carry from one microbatch to the next, after a flag was switched, is that of one device where
forwards are in order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.small import WIDTH


class Block(nn.Module):
    """Does something else once it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.use(x) if self.flag else x

    def use(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


class Averages(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(WIDTH))

    def use(self, x: Tensor) -> Tensor:
        self.held.lerp_(mean(x), 0.5)
        return x - self.held.clone()


class Follows(Block):
    held: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        last, self.held = self.held, mean(x)
        return x if last is None else x - last


class Counts(Block):
    held = 0

    def use(self, x: Tensor) -> Tensor:
        self.held += 1
        return x * self.held


class Queues(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def use(self, x: Tensor) -> Tensor:
        held = sum(self.held, torch.zeros(WIDTH))
        self.held.append(mean(x))
        return x - held


def model(kind: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("kind", [Averages, Follows, Counts, Queues])
def test_in_order_it_is_right(kind: type[Block]) -> None:
    (mine, its), generator = (model(kind) for _ in range(2)), torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    with pipeline(mine, (x,), loss=F.mse_loss, ranks=2, microbatches=4, schedule="1f1b") as pipe:
        for step in range(3):
            mine[1].flag = its[1].flag = step >= 1
            for one in (mine, its):
                one.zero_grad()
            pipe.step(x, target=y)
            step_by_hand(its, (x,), y, F.mse_loss, 4)
            assert_same_gradients(mine, its)
