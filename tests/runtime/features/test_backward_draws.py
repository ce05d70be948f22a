"""Random numbers drawn in backward would follow the schedule, and are refused; a forward that runs again may draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import PartitionError, pipeline, verify

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


class RoundsAtRandom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


class InAFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return RoundsAtRandom.apply(self.linear(x))


class InAHook(nn.Module):
    """With dropout: its generator is one that the pipeline seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.drop(x))
        if y.requires_grad:
            y.register_hook(self.draw)
        return y

    def draw(self, grad: Tensor) -> Any:
        return grad * torch.rand_like(grad)


@pytest.mark.parametrize(("schedule", "kind"), [("zb-h1", InAFunction), ("gpipe", InAHook), ("1f1b", InAFunction)])
def test_numbers_drawn_in_backward_are_refused(schedule: str, kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6))
    state = torch.get_rng_state()
    with (
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["1"], schedule=schedule, microbatches=4) as pipe,
        pytest.raises(PartitionError, match=r"backward of stage 1 draws random numbers .* in the forward, and keep"),
    ):
        pipe.step(X, target=TARGET)
    assert torch.equal(torch.get_rng_state(), state)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.rand_like(x)
        ctx.save_for_backward(gate, torch.rand_like(x))
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1]


class DrawsInForward(nn.Module):
    """What is run again in backward draws there what it drew before."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.restores = nn.Linear(6, 6), nn.Dropout(0.5), restores

    def body(self, x: Tensor) -> Tensor:
        return self.drop(Gated.apply(self.linear(x)) if self.restores else self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=self.restores)


@pytest.mark.parametrize(
    ("schedule", "restores", "recompute"),
    [("zb-h1", True, "never"), ("gpipe", True, "always"), ("gpipe", True, 1), ("1f1b", False, "never")],
)
def test_what_runs_again_in_backward_may_draw(schedule: str, restores: bool, recompute: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(DrawsInForward(restores) for _ in range(4)))
    given = {"ranks": 2, "schedule": schedule, "microbatches": 4, "recompute": recompute}
    with pipeline(model, (X,), loss=F.mse_loss, **given) as pipe:
        pipe.step(X, target=TARGET)
    if restores:
        verify(model, (X,), target=TARGET, loss_fn=F.mse_loss, **given).check()
