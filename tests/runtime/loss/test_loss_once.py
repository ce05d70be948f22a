"""A loss function is called once for each microbatch, in their order if it matters, also where the last stage's forward
runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.schedule import Schedule
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.small import batch, mlp

ROWS = [" ".join(f"{rank}{op}{k}" for op in "FIW" for k in range(3)) for rank in range(2)]
SPLIT = Schedule.parse(f"split: 3 microbatches, stages on ranks 0 1\nrank 0: {ROWS[0]}\nrank 1: {ROWS[1]}")
"""Where I does not follow on F at once, the last stage runs again, too."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", pytest.param(SPLIT, id="split")])
def test_a_forward_that_runs_again_calls_the_loss_once(schedule: str | Schedule) -> None:
    """A loss may count its calls, or write into its target."""
    calls: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(calls))
        return (output - target.sub_(1)).square().mean() * len(calls)

    model, reference, (x, y) = mlp(), mlp(), batch()
    with penstock.pipeline(
        model, (x,), ranks=2, schedule=schedule, microbatches=3, loss=counted, recompute="always"
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y.clone())
    assert len(calls) == 6
    calls.clear()
    for _ in range(2):
        step_by_hand(reference, (x,), y.clone(), counted, 3)
    assert_same_gradients(model, reference)


class Centred(nn.Module):
    """As the loss of DINO: takes a moving average away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))
        self.seen = 0.0  # what it notes for others to look at

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target - self.center.clone()).square().mean()
        self.center.lerp_(output.detach().mean(), 0.5)
        self.seen = loss.item()
        return loss


def within(loss: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    return lambda output, target: loss(output, target) + 0


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved-1f1b"])
def test_a_loss_that_keeps_state_is_called_in_order(schedule: str) -> None:
    model, reference, (x, y) = mlp(), mlp(), batch()
    with penstock.pipeline(model, (x,), ranks=2, schedule=schedule, microbatches=4, loss=Centred()) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    loss = Centred()
    for _ in range(2):
        step_by_hand(reference, (x,), y, loss, 4)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("given", [lambda loss: loss, within, lambda loss: loss.forward], ids=["it", "within", "bound"])
def test_two_copies_of_the_last_stage_would_each_update_a_buffer(given: Callable[..., Any]) -> None:
    x, y = batch()
    with (
        penstock.pipeline(mlp(), (x,), ranks=2, schedule="dualpipe", microbatches=4, loss=given(Centred())) as pipe,
        pytest.raises(penstock.ArgumentError, match=r"updates its buffer '.*center'.*dualpipe-v"),
    ):
        pipe.step(x, target=y)
