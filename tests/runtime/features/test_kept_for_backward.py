"""What a microbatch's own forward has left is what its backward finds, in whatever part of it code runs;
or the step is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import PartitionError, pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.small import WIDTH, batch


def around(*blocks: nn.Module) -> nn.Module:
    """The blocks on the first of two stages."""
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(ends[0], nn.Tanh(), *blocks, *ends[1:])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def as_one_device(
    make: Callable[[], nn.Module],
    *,
    between: Callable[[nn.Module, int], object] = lambda model, step: None,
    steps: int = 2,
    **options: Any,
) -> None:
    """Two steps give the gradients of plain torch."""
    (mine, its), (x, y) = (seeded(make), seeded(make)), batch()
    with pipeline(mine, (x,), loss=F.mse_loss, ranks=2, microbatches=4, **options) as pipe:
        for step in range(steps):
            between(mine, step)
            between(its, step)
            pipe.step(x, target=y)
            step_by_hand(its, (x,), y, F.mse_loss, 4)
            assert_same_gradients(mine, its)


# -- weight gradients that wait ---------------------------------------------------------------------------------------


class Scales(nn.Module):
    """A hook on a weight's gradient takes what the forward has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noted = nn.Linear(WIDTH, WIDTH), torch.tensor(1.0)
        self.linear.weight.register_hook(lambda gradient: gradient * self.take())

    def take(self) -> Tensor:
        return self.noted

    def forward(self, x: Tensor) -> Tensor:
        self.noted = x.detach().mean()
        return self.linear(x)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_hooks_on_weights_that_wait_for_w_find_what_their_own_forward_left(recompute: str) -> None:
    as_one_device(lambda: around(Scales()), schedule="zb-h1", recompute=recompute)


# -- buffers beside deferred batch norms ------------------------------------------------------------------------------


class Averages(nn.Module):
    """Its moving average matters in backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.5)
        y = x * 1.0
        y.register_hook(lambda gradient: gradient * self.mean)
        return y


class Counting(nn.Module):
    """Its average is updated twice, in the forward and where the checkpoint runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.linear(x)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_an_average_in_a_checkpoint_beside_deferred_batch_norms_is_refused() -> None:
    with pytest.raises(PartitionError, match="a Counting updates buffers in a forward that runs itself again"):
        as_one_device(lambda: around(Again(), nn.BatchNorm1d(WIDTH)), schedule="gpipe", deferred_batch_norm=True)


# -- attributes that a forward sets late ------------------------------------------------------------------------------


# -- steps that raise -------------------------------------------------------------------------------------------------


class BadBatchError(Exception):
    """What a caller skips a bad batch for."""


class RaisesAtFirst(Scales):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise BadBatchError
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_what_is_kept_is_learned_after_a_first_step_that_raised(schedule: str) -> None:
    (mine, its), (x, y) = (seeded(lambda: around(RaisesAtFirst())) for _ in range(2)), batch()
    with pipeline(mine, (x,), loss=F.mse_loss, ranks=2, microbatches=4, schedule=schedule) as pipe:
        mine[2].fails = True
        with pytest.raises(BadBatchError):
            pipe.step(x, target=y)
        mine[2].fails = False
        mine.zero_grad()
        pipe.step(x, target=y)
    step_by_hand(its, (x,), y, F.mse_loss, 4)
    assert_same_gradients(mine, its)
