"""Hooks on the gradient of a parameter that several stages hold see a share of it, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import PartitionError, pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand

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
def test_a_hook_on_a_tied_parameter_is_refused_when_it_is_made_or_in_the_next_step(register: str, hook: Any) -> None:
    model = tied()
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"]) as pipe:
        pipe.step(X, target=TARGET)
        getattr(model[0].weight, register)(hook)
        pipe.predict(X)
        with pytest.raises(PartitionError, match=REFUSED):
            pipe.step(X, target=TARGET)
    with pytest.raises(PartitionError, match=REFUSED):
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"])


@pytest.mark.parametrize(
    ("register", "hook", "options"),
    [
        ("register_hook", clamp, {"schedule": "zb-h1"}),
        ("register_hook", clamp, {"schedule": "zb-h1", "compile": {"backend": "aot_eager"}}),
        ("register_hook", clamp, {"schedule": "dualpipe"}),
        ("register_post_accumulate_grad_hook", clamp_accumulated, {"schedule": "zb-h1"}),
    ],
)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # torch's compiler
def test_a_hook_where_one_stage_holds_all_uses_is_called_with_the_whole_gradient(
    register: str, hook: Any, options: dict[str, Any]
) -> None:
    models = untied(), untied()
    for model in models:
        getattr(model[2].weight, register)(hook)
    piped, plain = models
    with pipeline(piped, (X,), loss=F.mse_loss, ranks=2, cuts=["2"], microbatches=4, **options) as pipe:
        pipe.step(X, target=TARGET)
    step_by_hand(plain, (X,), TARGET, F.mse_loss, 4)
    assert_same_gradients(piped, plain, but=[name for name, _ in plain.named_parameters()])


def test_a_hook_on_what_copies_of_a_stage_accumulate_is_refused() -> None:
    model = untied()
    model[2].weight.register_post_accumulate_grad_hook(clamp_accumulated)
    with pytest.raises(PartitionError, match=r"'2.weight' has a hook on its gradient"):
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, cuts=["2"], schedule="dualpipe", microbatches=4)
