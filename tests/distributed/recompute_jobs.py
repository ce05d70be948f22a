"""What ranks run for `test_recompute_ranks`: training of a small model of four stages, with its curve of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import penstock
from scaffolding.everything import ROWS, WIDTH, Layer, everything, everything_goes
from scaffolding.models import squared_error

STEPS = 6


class Untied(nn.Module):
    """Batch norm, dropout, and a skip across all stages; no parameter is on two stages, so that every bit is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(y) + skip
        return y


@everything_goes
def curve(rank: int, clip: float, options: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The losses of the steps, the norms of their gradients, and what the rank then holds."""
    torch.manual_seed(0)
    model = Untied()
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    losses, norms = [], []
    with penstock.pipeline(model, (x,), loss=squared_error, microbatches=4, seed=0, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(pipe.step(x * (1 + step % 5), target=y).loss))
            norms.append(float(pipe.clip_grad_norm_(clip)))
            optimizer.step()
        held = {name: p.detach().clone() for name, p in (*pipe.named_parameters(), *pipe.named_buffers())}
    return losses, norms, held


@everything_goes
def verify_everything(rank: int, options: dict[str, Any]) -> tuple[bool, str]:
    model, x, y = everything()
    report = penstock.verify(model, (x,), target=y, loss_fn=squared_error, **options)
    return report.ok, report.summary()
