"""Objects that cross cuts, under schedules that split the backward, run forwards again, or have several chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaffolding.models import OneLayer
from scaffolding.proofs import proven

WIDTH = 6


@dataclass
class Stream:
    """What the blocks hand on, and what they leave in it."""

    x: Tensor
    keys: list[Tensor] = field(default_factory=list)
    seen: int = 0
    total: Tensor | None = None


class Block(OneLayer):
    def forward(self, given: Stream, losses: list[Tensor]) -> Stream:
        x = F.dropout(self.layer(given.x), 0.2, self.training).tanh()
        given.keys.append(x * len(given.keys))
        given.seen += 1
        given.total = x * x if given.total is None else given.total * 0.5 + x
        x = x * given.total  # a second run that starts from what the first has left would save another total
        losses.append(x.square().mean() * given.seen)
        return Stream(x + given.keys[0], given.keys, given.seen, given.total)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, given: Stream) -> Any:
        losses: list[Tensor] = []
        for block in self.blocks:
            given = block(given, losses)
        return Stream(given.x + sum(losses), given.keys, given.seen, given.total)


def error(output: Stream, target: Tensor) -> Tensor:
    assert (type(output), output.seen, len(output.keys)) == (Stream, 4, 4)
    return ((output.x - target) ** 2).mean() + output.keys[2].mean()


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "ranks": 4},
        {"schedule": "interleaved-1f1b", "ranks": 2, "stages_per_rank": 2},
        {"schedule": "zb-h1", "ranks": 2},
        {"ranks": 2, "recompute": "always"},
        {"ranks": 2, "recompute": 1},
    ],
    ids=str,
)
def test_objects_under_schedules(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    proven(Model(), Stream(torch.randn(6, WIDTH)), torch.randn(6, WIDTH), error, microbatches=4, **options)
