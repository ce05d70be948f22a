"""A loss function may return scalars to log besides its loss: they come back, averaged like the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.models import squared_error
from scaffolding.proofs import close
from scaffolding.small import batch, mlp


@dataclass
class Fields:
    loss: Tensor
    big: Tensor
    count: int


class Named(NamedTuple):
    """As `nn.AdaptiveLogSoftmaxWithLoss` returns."""

    output: Tensor
    loss: Tensor


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], set[str]]] = {
    "tuple": (lambda loss, big, o: (loss, big, 2.0), {"1", "2"}),
    "with itself in a dict": (lambda loss, big, o: (loss, {"big": big, "lm loss": loss}), {"big", "lm loss"}),
    "dict": (lambda loss, big, o: {"big": big, "loss": loss, "name": "a", "logits": o}, {"big"}),
    "dict without a loss": (lambda loss, big, o: {"total": loss, "big": big, "count": 2}, {"big", "count"}),
    "nested": (lambda loss, big, o: {"loss": loss, "each": {"big": big}}, {"each.big"}),
    "dataclass": (lambda loss, big, o: Fields(loss, big, 2), {"big", "count"}),
    "namespace": (lambda loss, big, o: SimpleNamespace(big=big, loss=loss), {"big"}),
    "named tuple": (lambda loss, big, o: Named(o, loss), set()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_first_or_the_one_named_loss_is_the_loss(form: str) -> None:
    build, names = FORMS[form]

    def loss(output: Tensor, target: Tensor) -> Any:
        return build(squared_error(output, target), output.abs().mean(), output)

    model, reference, (x, y) = mlp(), mlp(), batch()
    whole = reference(x).detach()
    with penstock.pipeline(model, (x,), ranks=2, microbatches=3, loss_fn=loss) as pipe:
        result, evaluated = pipe.step(x, target=y), pipe.evaluate(x, target=y)
    by_hand = step_by_hand(reference, (x,), y, squared_error, 3)
    assert_same_gradients(model, reference)
    assert torch.equal(result.loss, by_hand.total)
    assert result.parts.keys() == names
    assert evaluated.parts.keys() == names
    for name, value in result.parts.items():
        expected = {"2": 2.0, "count": 2.0, "lm loss": float(by_hand.total)}.get(name, float(whole.abs().mean()))
        torch.testing.assert_close(float(value), expected)
        assert not value.requires_grad
    close(penstock.verify(mlp, (x,), target=y, loss_fn=loss, ranks=2, microbatches=3))


def test_parts_follow_the_reduction() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), output.sum()

    x, y = batch()
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=3, loss_fn=loss, reduction="sum") as pipe:
        torch.testing.assert_close(pipe.step(x, target=y).parts["1"], mlp()(x).sum().detach())


def test_a_models_own_losses_come_back() -> None:
    class Experts(nn.Sequential):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = super().forward(x)
            aux = output.square().mean()
            return {"loss": F.mse_loss(output, labels) + 0.1 * aux, "aux_loss": aux, "logits": output}

    x, y = batch()
    with penstock.pipeline(Experts(*mlp()), (), {"x": x, "labels": y}, ranks=2, microbatches=3) as pipe:
        result = pipe.step(x=x, labels=y)
        assert result.parts.keys() == {"aux_loss"}
        torch.testing.assert_close(result.parts["aux_loss"], mlp()(x).square().mean().detach())


def test_parts_that_come_later_are_refused() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        calls.append(0)
        value = squared_error(output, target)
        return {"loss": value, "one": value.detach(), **({"two": value.detach()} if len(calls) > 3 else {})}

    x, y = batch()
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=3, loss_fn=loss) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(penstock.ArgumentError, match="'two' besides its loss, which it did not in the first step"):
            pipe.step(x, target=y)


@pytest.mark.parametrize("returned", [{}, ("loss",)])
def test_what_is_no_loss_is_refused(returned: Any) -> None:
    with (
        penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=lambda o, t: returned) as pipe,
        pytest.raises(penstock.ArgumentError, match="expected a scalar tensor"),
    ):
        pipe.step(batch()[0], target=batch()[1])
