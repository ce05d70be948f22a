"""The bytes that a rank's step really holds, as torch's CPU allocator counts them, beside what `inspect` predicts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import penstock

WIDTH, ROWS, MICROBATCHES, BLOCKS = 64, 256, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


def case(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(dtype)
    x, y = (torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=dtype) for _ in range(2))
    return model, x, y


def held(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> int:
    """The most bytes that tensors of this rank take in a step after the first: of its stages, and what it makes."""
    torch.set_num_threads(1)
    model, x, y = case(dtype)
    with penstock.pipeline(model, (x,), loss_fn=F.mse_loss, microbatches=MICROBATCHES, **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        for parameter in pipe.parameters():
            parameter.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            pipe.step(x, target=y)
        own = sum(parameter.nbytes for parameter in pipe.parameters())
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return own + most


def predicted(dtype: torch.dtype, ranks: int, options: dict[str, Any]) -> list[int]:
    """Each rank's peak, as `inspect` predicts it."""
    model, x, y = case(dtype)
    stages = ranks * options.get("chunks", 1)
    given = {"microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "target": y, "stages": stages, "balance": "flops"}
    return [each.peak for each in penstock.inspect(model, (x,), **given | options).memory]
