"""Updates in place of what backward uses: through `.data`, which autograd does not see, and of what the model holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import inspect, verify

WIDTH = 6


class Block(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class WritesWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.mul_(0.9)
        return super().forward(x)


class BinaryWeight(Block):
    """Computes with the signs of its weight, and has it back before anyone looks."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.data
        self.layer.weight.data = weight.sign()
        y = super().forward(x)
        self.layer.weight.data = weight
        return y


class WritesWeightForReal(WritesWeight):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * len(x.detach().sum(1).nonzero().tolist()))


class WritesBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        self.scale.data.mul_(0.9)
        return y


class SetsOnce(Block):
    """Initialised by the data of the first call, as activation norms are."""

    is_set: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.layer.weight.data.div_(x.std())
            self.is_set.fill_(True)
        return super().forward(x)


class Codebook(Block):
    """The distances save what is updated, but no gradient is taken of the choice."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        chosen = torch.cdist(x, self.scale.diag()).argmin(-1)
        found = nn.functional.one_hot(chosen, WIDTH).to(x) @ self.scale.diag()
        self.scale.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + (found - x).detach()


def chain(block: type[Block]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(block() for _ in range(4)))


def check(make: Callable[[], nn.Module], **options: Any) -> None:
    x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    options = {"ranks": 1, "schedule": "gpipe", "microbatches": 2, "whole_batch": False, **options}
    assert verify(make, (x,), target=target, loss_fn=F.mse_loss, **options).ok


def test_what_the_model_holds_may_be_written_where_its_backward_comes_next() -> None:
    check(chain(WritesWeight), schedule="naive")


@pytest.mark.parametrize(("block", "schedule"), [(SetsOnce, "zb-h1"), (BinaryWeight, "gpipe")])
def test_what_backward_finds_as_its_forward_left_it_may_be_written(block: type[Block], schedule: str) -> None:
    check(chain(block), ranks=2, schedule=schedule, microbatches=4)


def test_a_forward_that_runs_again_finds_its_own() -> None:
    check(chain(WritesBuffer), ranks=2, microbatches=4, recompute="always")


def test_what_no_gradient_is_taken_of_may_be_written() -> None:
    check(chain(Codebook), ranks=2, microbatches=4)


def test_recording_leaves_the_weights_as_they_were() -> None:
    model = chain(WritesWeightForReal)()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inspect(model, (torch.randn(4, WIDTH),), stages=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
