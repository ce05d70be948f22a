"""What a loss trains is found wherever a loss may keep it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from scaffolding.small import batch, mlp


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target)


class Plain:
    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.5))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target)


def scaled(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    return F.mse_loss(output * scale, target)


def in_closure() -> Callable[[Tensor, Tensor], Tensor]:
    inner, teacher = Scaled(), mlp(2).eval()
    return lambda output, target: inner(output, target) + F.mse_loss(output, teacher(target).detach())


def in_an_object() -> Callable[[Tensor, Tensor], Tensor]:
    class Holder:
        losses: dict[str, list[nn.Module]]

    holder = Holder()
    holder.losses = {"main": [Scaled()]}
    return lambda output, target: 2 * holder.losses["main"][0](output, target)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (in_an_object, "loss.holder.losses.main.0.scale"),
        (lambda: Scaled().forward, "loss.scale"),
        (Plain, "loss.scale"),
        (lambda: partial(scaled, scale=torch.tensor(0.5, requires_grad=True)), "loss.scale"),
        (in_closure, "loss.inner.scale"),
    ],
)
@pytest.mark.filterwarnings("ignore:loss_fn calls inner:UserWarning", "ignore:loss_fn calls holder:UserWarning")
def test_names(make: Callable[[], Any], name: str) -> None:
    with penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=make()) as pipe:
        named = dict(pipe.named_parameters())
        assert [*named][12:] == [name]
        pipe.step(batch()[0], target=batch()[1])
        assert named[name].grad is not None
        assert name in pipe.stages[-1].parameters
        assert [len(group["params"]) for group in pipe.parameter_groups(lambda n, _: {"lr": 1 + (n == name)})] == [
            12,
            1,
        ]


def test_a_loss_that_is_a_part_of_the_model_keeps_its_names() -> None:
    class Whole(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self[:-1]:
                x = layer(x)
            return x

    model = Whole(*mlp(), Scaled())
    with penstock.pipeline(model, batch()[:1], ranks=2, microbatches=3, loss_fn=model[-1]) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert [*pipe.state_dict()] == [*model.state_dict()]


def test_a_model_with_a_part_of_that_name() -> None:
    model = nn.Sequential()
    model.add_module("loss", nn.Linear(9, 9))
    model.add_module("head", nn.Linear(9, 9))
    with penstock.pipeline(model, batch()[:1], ranks=2, microbatches=3, loss_fn=Scaled()) as pipe:
        assert [name for name, _ in pipe.named_parameters()][-1] == "loss_fn.scale"


def test_a_frozen_model_trains_its_loss() -> None:
    loss = Scaled()
    with penstock.pipeline(mlp().requires_grad_(False), batch()[:1], ranks=2, microbatches=3, loss_fn=loss) as pipe:
        pipe.step(batch()[0], target=batch()[1])
        assert loss.scale.grad is not None
        loss.scale.requires_grad_(False)
        assert "loss.scale" in pipe.state_dict()


def test_the_models_own_state_is_enough_to_load() -> None:
    with penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=Scaled()) as pipe:
        pipe.load_state_dict(mlp(seed=1).state_dict())
        state = pipe.state_dict()
        assert torch.equal(state["0.weight"], mlp(seed=1)[0].weight)
        pipe.load_state_dict({**state, "loss.scale": torch.tensor(2.0)})
        assert state["loss.scale"] == 2


class AGuess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid()


D = AGuess()


def fooled(fake: Tensor, _: Tensor) -> Tensor:
    return sum((D(one).log().mean() for one in [fake]), start=fake.new_zeros(()))


def test_a_discriminator_that_a_loss_names_is_trained_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="loss_fn calls D, whose parameters are trained .* nn.Module .*requires_grad_"):
        pipe = penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=fooled)
    with pipe:
        assert [name for name, _ in pipe.named_parameters()][12:] == ["loss.D.inner.weight", "loss.D.inner.bias"]
        assert any("loss_fn calls D," in str(note) for note in pipe.notes)
    D.requires_grad_(False)
    with penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=fooled) as pipe:
        assert len(list(pipe.parameters())) == 12
    D.requires_grad_(True)
