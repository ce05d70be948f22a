"""Layers that sleep instead of computing, so that processes on few cores take as long as they are told to."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """The identity after a sleep. Backward sleeps twice as long, without what is extra."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, extra: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds + extra)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0] * 1.0, None, None


class SleepingBlock(nn.Module):
    """A layer of [rows, 4] whose forward takes `seconds` and `extra`, and its backward twice `seconds`."""

    def __init__(self, seconds: float, extra: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seconds, self.extra = seconds, extra

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.inner(x), self.seconds, self.extra)  # type: ignore[no-any-return]
