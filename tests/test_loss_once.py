"""A loss function is called once for each microbatch, also where the last stage's forward runs again."""

from __future__ import annotations

import pytest
from torch import Tensor

import penstock
from by_hand import assert_same_gradients, step_by_hand
from small import batch, mlp


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_forward_that_runs_again_calls_the_loss_once(schedule: str) -> None:
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
