"""What a microbatch's own forward has left is what its backward finds, in whatever part of it code runs;
or the step is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.small import WIDTH, batch


def around(*blocks: nn.Module) -> nn.Module:
    """The blocks on the first of two stages."""
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(ends[0], nn.Tanh(), *blocks, *ends[1:])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# -- steps that raise -------------------------------------------------------------------------------------------------


class BadBatchError(Exception):
    """What a caller skips a bad batch for."""


class RaisesAtFirst(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise BadBatchError
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_what_is_kept_is_learned_after_a_first_step_that_raised(schedule: str) -> None:
    (mine, its), (x, y) = (seeded(lambda: around(RaisesAtFirst(WIDTH, WIDTH))) for _ in range(2)), batch()
    with pipeline(mine, (x,), loss=F.mse_loss, ranks=2, microbatches=4, schedule=schedule) as pipe:
        mine[2].fails = True
        with pytest.raises(BadBatchError):
            pipe.step(x, target=y)
        mine[2].fails = False
        mine.zero_grad()
        pipe.step(x, target=y)
    step_by_hand(its, (x,), y, F.mse_loss, 4)
    assert_same_gradients(mine, its)
