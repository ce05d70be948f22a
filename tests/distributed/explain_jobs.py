"""A model whose blocks take as long as they are told to, forward and backward: they sleep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.pipe.result import StepResult

MICROBATCHES = 8


class Slow(torch.autograd.Function):
    """The identity, after some sleep; its backward takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, extra: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds + extra)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0] * 1.0, None, None


class Block(nn.Module):
    """A layer that takes so long on any rank, and longer forwards on one of them."""

    def __init__(self, seconds: float, extra: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seconds, self.extra = seconds, extra

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(self.inner(x), self.seconds, self.extra)  # type: ignore[no-any-return]


def traced(
    rank: int, seconds: Sequence[float], cuts: Sequence[str], slow_rank: int = -1, extra: float = 0.0
) -> list[dict[str, Any]]:
    """The timelines of two steps of a model with such blocks, after one for warming up."""
    torch.manual_seed(0)
    here = extra if dist.get_rank() == slow_rank else 0.0
    model = nn.Sequential(*(Block(one, here) for one in seconds))
    x = torch.randn(MICROBATCHES, 4)
    leaves = [str(place) for place in range(len(seconds))]
    found: list[StepResult] = []
    with penstock.pipeline(
        model, (x,), loss=nn.functional.mse_loss, microbatches=MICROBATCHES, cuts=list(cuts), leaves=leaves
    ) as pipe:
        for _ in range(3):
            found.append(pipe.step(x, target=x, timeline=True))
        return [one.timeline.to_dict() for one in found[1:] if one.timeline is not None]
