"""Hooks on the gradient of a parameter that several stages hold see a share of it, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import PartitionError, pipeline

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)
REFUSED = r"'0.weight' has a hook on its gradient .* stages \[0, 1\].* share .*after the step"


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


HOOKS = pytest.mark.parametrize(
    ("register", "hook"), [("register_hook", clamp), ("register_post_accumulate_grad_hook", clamp_accumulated)]
)


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[4].weight = model[0].weight
    return model


def untied() -> nn.Sequential:
    return nn.Sequential(*list(tied())[:4])


@HOOKS
def test_a_hook_on_a_tied_parameter_is_refused(register: str, hook: Any) -> None:
    model = tied()
    getattr(model[0].weight, register)(hook)
    with pytest.raises(PartitionError, match=REFUSED):
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"])


@HOOKS
def test_a_hook_that_is_registered_later_is_refused_in_the_next_step(register: str, hook: Any) -> None:
    model = tied()
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"]) as pipe:
        pipe.step(X, target=TARGET)
        getattr(model[0].weight, register)(hook)
        pipe.predict(X)
        with pytest.raises(PartitionError, match=REFUSED):
            pipe.step(X, target=TARGET)


@pytest.mark.parametrize(
    ("register", "hook", "schedule"),
    [
        ("register_hook", clamp, "zb-h1"),
        ("register_hook", clamp, "dualpipe"),
        ("register_post_accumulate_grad_hook", clamp_accumulated, "zb-h1"),
    ],
)
def test_a_hook_where_one_stage_holds_all_uses_is_called_with_the_whole_gradient(
    register: str, hook: Any, schedule: str
) -> None:
    models = untied(), untied()
    for model in models:
        getattr(model[2].weight, register)(hook)
    piped, plain = models
    with pipeline(piped, (X,), loss=F.mse_loss, ranks=2, cuts=["2"], schedule=schedule, microbatches=4) as pipe:
        pipe.step(X, target=TARGET)
    for x, target in zip(X.chunk(4), TARGET.chunk(4), strict=True):
        torch.autograd.backward(F.mse_loss(plain(x), target) / 4)
    for (name, mine), other in zip(piped.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


def test_a_hook_on_what_copies_of_a_stage_accumulate_is_refused() -> None:
    model = untied()
    model[2].weight.register_post_accumulate_grad_hook(clamp_accumulated)
    with pytest.raises(PartitionError, match=r"'2.weight' has a hook on its gradient"):
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"], schedule="dualpipe", microbatches=4)
