"""How often the host waits for a device in a steady step: jobs for a rank that has the stand-in device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from scaffolding import stand_in
from scaffolding.stand_in import DEVICE

ROWS, WIDTH = 8, 6

STEADY = 6
"""After so many steps all is known that a pipeline learns while it runs."""


class Masked(nn.Module):
    """Asks whether a mask leaves anything out, as models of `transformers` do."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Dropout(0.1)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if (mask == torch.ones(1, dtype=torch.int64, device=mask.device)).all() else x * mask[:, None]


def tokens_that_count(target: Tensor) -> Tensor:
    return (target >= 0).sum()


def steady_step(given: dict[str, Any], also: str) -> dict[str, int]:
    """What the host waited for in a steady step, and in what a user does then."""
    copies = given.get("schedule") == "dualpipe"  # it refuses statistics, which each copy would see a part of
    model = Masked(nn.LayerNorm if copies else nn.BatchNorm1d)
    x, mask, y = torch.randn(ROWS, WIDTH), torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS) % WIDTH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with penstock.pipeline(
        model, (x, mask), ranks=2, microbatches=4, loss=F.cross_entropy, devices=DEVICE, **given
    ) as pipe:
        for step in range(STEADY + 1):
            if step == STEADY:
                stand_in.waits.clear()
            optimizer.zero_grad()
            result = pipe.step(x, mask, target=y)
            if also == "clip":
                pipe.clip_grad_norm_(1.0)
            if also == "read":
                float(result.loss)
            optimizer.step()
        return dict(stand_in.waits)


class Named(Masked):
    """Names the device in what it asks, and asks of two inputs at once."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if (mask == torch.ones(1, dtype=torch.int64, device=DEVICE)).all():
            return super().forward(x, mask)
        return -super().forward(x, mask)


class OfTwo(Masked):
    """Asks of two inputs at once."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask) if (mask == other).all() else -super().forward(x, mask)


def odd_devices() -> None:
    """Guards that name a device, or read inputs on two; a reduction with a tensor of its own on the device."""
    x, mask, y = torch.randn(ROWS, WIDTH), torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS) % WIDTH
    unwanted = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def weight(target: Tensor) -> Tensor:
        return (target != unwanted).sum()

    for kind, inputs in ((Named, (x, mask)), (OfTwo, (x, mask, mask.to(DEVICE)))):
        with penstock.pipeline(
            kind(nn.LayerNorm), inputs, ranks=2, microbatches=4, loss=F.cross_entropy, devices=DEVICE, reduction=weight
        ) as pipe:
            losses = [float(pipe.step(*inputs, target=y).loss) for _ in range(2)]
        with penstock.pipeline(
            kind(nn.LayerNorm), tuple(t.to(DEVICE) for t in inputs), ranks=2, microbatches=4, loss=F.cross_entropy,
            reduction=weight,
        ) as pipe:  # fmt: skip
            assert losses == [float(pipe.step(*(t.to(DEVICE) for t in inputs), target=y).loss) for _ in range(2)]
