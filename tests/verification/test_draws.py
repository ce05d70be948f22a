"""Models that draw in their own forward are compared with that forward itself, never with their recording."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Report, verify
from penstock.partition.recorder import foreign
from penstock.partition.recorder.chance import Chance

WIDTH = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(Block() for _ in range(4)), nn.Dropout(0.3)
        self.first = nn.Linear(WIDTH, WIDTH)


class Noisy(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * 0.1
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training) + random.random() * np.random.rand() * torch.rand_like(x)
        return x


def reparametrized(mean: Tensor, scale: Tensor) -> Tensor:
    return torch.distributions.Normal(mean, scale.exp()).rsample()


class Samples(Blocks):
    """As a variational autoencoder, in a function that several lines call."""

    def forward(self, x: Tensor) -> Tensor:
        x = reparametrized(self.blocks[0](x), self.blocks[1](x))
        return self.blocks[3](reparametrized(self.blocks[2](x), x))


class Drops(Blocks):
    """Layer drop, with a block's dropout shared by all of them, inside of branches and behind them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if random.random() < 0.5:
                continue
            x = x + self.drop(block(x))
        return self.drop(x)


class DropsNoise(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand([]) < 0.5:
                x = x + block(x) + torch.randn_like(x) * 0.1
        return x * torch.rand_like(x)


class DecidesFirst(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        drops = torch.rand(len(self.blocks))
        for index, block in enumerate(self.blocks):
            if drops[index] < 0.5:
                x = x + self.drop(block(x))
        return x


class Checkpoints(Blocks):
    """Each part draws twice, and once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        def part(block: nn.Module, x: Tensor) -> Tensor:
            return block(x) + torch.randn_like(x) * torch.rand_like(x)

        for block in self.blocks:
            x = checkpoint(part, block, x, use_reentrant=False)
        return x


def proof(kind: type[nn.Module], schedule: str = "1f1b", **options: Any) -> Report:
    torch.manual_seed(0)
    x, target = torch.randn(2, 8, WIDTH)
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "seed": 5, "whole_batch": False, **options}
    return verify(kind(), (x,), target=target, loss_fn=F.mse_loss, schedule=schedule, **given)


KINDS = (Noisy, Samples, Drops, DropsNoise, DecidesFirst, Checkpoints)


@pytest.mark.parametrize(("kind", "schedule"), [*zip(KINDS, cycle(["zb-h1", "dualpipe"]), strict=False)])
def test_own_draws_come_from_the_same_streams(kind: type[nn.Module], schedule: str) -> None:
    report = proof(kind, schedule)
    assert report.ok, report.summary()


@pytest.mark.parametrize("kind", [Noisy, Drops])
def test_a_number_that_a_recording_freezes_is_seen(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(self: Chance, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        self._generators = foreign.states()
        return value

    monkeypatch.setattr(Chance, "_draw", frozen)
    assert not proof(kind).ok
