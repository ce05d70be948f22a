"""Buffers that a backward updates: a sum is kept, what depends on the order of forwards and backwards is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import PartitionError, pipeline
from scaffolding.by_hand import step_by_hand
from scaffolding.proofs import proven

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


class Averages(nn.Module):
    """A moving average, which its checkpoint updates twice for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def body(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.scale.lerp_(y.var(0), 0.1)
        return torch.tanh(y * self.scale.rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_a_moving_average_is_kept_where_each_backward_follows_its_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), Averages())
    proven(model, X, TARGET, ranks=2, schedule="1f1b", microbatches=4)


class Noted(torch.autograd.Function):
    """Adds what gradients it sees to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen += grad.abs().sum(0)
        return grad, None


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Noted.apply(self.linear(x), self.seen)
        return made


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_sum_over_gradients_is_that_of_one_device(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Sums() for _ in range(4)))
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, schedule=schedule, microbatches=4) as pipe:
        pipe.step(X, target=TARGET)
    seen, expected = model[3].get_buffer("seen").clone(), torch.zeros(6)
    for x, target in zip(X.chunk(4), TARGET.chunk(4), strict=True):
        y = model(x)
        expected += torch.autograd.grad(F.mse_loss(y, target) / 4, y)[0].abs().sum(0)
    assert torch.equal(seen, expected)


def test_a_sum_over_gradients_is_refused_where_stages_have_copies() -> None:
    model = nn.Sequential(*(Sums() for _ in range(4)))
    with (
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, schedule="dualpipe", microbatches=4) as pipe,
        pytest.raises(PartitionError, match=r"updates buffer '\d.seen', but this schedule runs several copies"),
    ):
        pipe.step(X, target=TARGET)


def chain(at: int) -> nn.Sequential:
    """One weight steps its optimizer as soon as it has a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    model[at].weight.register_post_accumulate_grad_hook(steps)  # type: ignore[union-attr, operator]
    return model


def steps(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


class DroppedAtTheEnds(nn.Linear):
    """Layer drop that leaves out the first and the last microbatch: they have no backward in a first stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else x * 1


def test_an_optimizer_in_backward_is_refused_where_layer_drop_spares_the_first_and_the_last() -> None:
    model = chain(0)
    model[0].__class__ = DroppedAtTheEnds
    x = X.clone()
    x[:, 0] = torch.tensor([-1, -1, 1, 1, 1, 1, -1, -1])
    with (
        pipeline(model, (x,), loss=F.mse_loss, ranks=4, microbatches=4, schedule="gpipe") as pipe,
        pytest.raises(PartitionError, match=r"backward of stage 0 updates parameter '0.weight' by a hook"),
    ):
        pipe.step(x, target=TARGET)


def test_an_optimizer_in_backward_steps_where_each_backward_follows_its_forward() -> None:
    model, plain = chain(3), chain(3)
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, microbatches=4) as pipe:
        pipe.step(X, target=TARGET)
    step_by_hand(plain, (X,), TARGET, F.mse_loss, 4)
    assert torch.equal(model[3].weight, plain[3].weight)


@pytest.mark.parametrize("how", ["late", "every eighth", "in W"])
def test_an_optimizer_in_backward_is_refused_whenever_it_steps(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    counts = dict.fromkeys(model.parameters(), 0)

    def hook(parameter: nn.Parameter) -> None:
        counts[parameter] += 1
        if counts[parameter] % (8 if how == "every eighth" else 1) == 0:
            steps(parameter)

    schedule, options = ("zb-h1", {}) if how == "in W" else ("1f1b", {"recompute": "always"})
    given: Any = {"ranks": 2, "microbatches": 8, "schedule": schedule, **options}
    with pipeline(model, (X,), loss=F.mse_loss, **given) as pipe:
        if how == "late":
            pipe.step(X, target=TARGET)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        with pytest.raises(PartitionError, match=r"backward of stage \d updates parameter '\d.weight' by a hook"):
            pipe.step(X, target=TARGET)
