"""Recomputation, offload and deferred batch norm in real processes; curves of losses at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from scaffolding.everything import ROWS, WIDTH, Layer, everything_goes
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


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


HERE = {"ranks": 1, "stages_per_rank": 4, "schedule": "gpipe"}
TWO = {"schedule": "interleaved-1f1b", "stages_per_rank": 2}
FOUR = {"schedule": "1f1b"}


def test_one_curve_of_losses_at_one_two_and_four_ranks(ranks2: Ranks, ranks4: Ranks) -> None:
    clip, recompute = 0.5, {0: "always", 1: 1, 2: "except_last"}
    options: dict[str, Any] = {"recompute": recompute, "offload": {3: True}, "deferred_batch_norm": True}
    losses, norms, held = curve(0, clip, {**HERE, **options})
    assert len(set(losses)) == STEPS
    assert losses[5] < losses[0]  # of the same batch
    assert max(norms) > clip
    for ranks, how in ((ranks2, TWO), (ranks4, FOUR)):
        parts = ranks.run(curve, clip, {**how, **options})
        assert all(part[:2] == (losses, norms) for part in parts)
        found = {name: tensor for part in parts for name, tensor in part[2].items()}
        assert found.keys() == held.keys()
        assert all(torch.equal(found[name], held[name]) for name in held)
