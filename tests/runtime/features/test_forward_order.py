"""A schedule of one's own may run a stage's forwards in any order, but not those of a stage that keeps something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock._base.errors import PartitionError
from penstock.schedule import Schedule

WIDTH = 5
BACKWARDS = Schedule.parse(
    "mine: 2 microbatches, stages on ranks 0 1\nrank 0: 0F1 0F0 0B0 0B1\nrank 1: 1F1 1F0 1B0 1B1"
)
X, Y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Notes(nn.Module):
    """Counts for others: what it computes does not depend on it."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


def model(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def step(block: Callable[[], nn.Module], schedule: str | Schedule, **options: Any) -> list[Tensor]:
    """The loss, gradients and buffers of a training step."""
    one = model(block)
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "ranks": 2, "schedule": schedule, **options}
    with penstock.pipeline(one, (X,), **options) as pipe:
        loss = pipe.step(X, target=Y[:, :1]).loss
    return [loss, *(p.grad for p in one.parameters() if p.grad is not None), *one.buffers()]


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        (lambda: nn.BatchNorm1d(WIDTH), "stage 0 carries '1.running_mean' over.*deferred_batch_norm=True"),
        (Counts, "carries '1.calls' over"),
    ],
)
def test_what_is_kept_is_refused_before_the_first_step(block: Callable[[], nn.Module], kept: str) -> None:
    order = r"this schedule runs its forwards in the order 1, 0; take one that runs them in order of microbatch \(1f1b"
    for make in (penstock.pipeline, penstock.inspect):
        with pytest.raises(PartitionError, match=order) as refused:
            make(model(block), (X,), loss_fn=nn.functional.mse_loss, schedule=BACKWARDS, **TWO[make])
        refused.match(kept)


TWO: dict[Any, Any] = {penstock.pipeline: {"ranks": 2}, penstock.inspect: {"stages": 2, "target": Y[:, :1]}}


@pytest.mark.parametrize(
    ("block", "options"), [(nn.Tanh, {}), (Notes, {}), (lambda: nn.BatchNorm1d(WIDTH), {"deferred_batch_norm": True})]
)
def test_others_run_in_any_order(block: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    found, ordered = (step(block, schedule, **options) for schedule in (BACKWARDS, "gpipe"))
    assert all(map(torch.equal, found, ordered))
