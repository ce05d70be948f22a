"""`check_finite=True`: the step that makes a NaN or Inf raises, and says where; what is meant is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.errors import NonFiniteError
from penstock.runtime.features import finite
from scaffolding.models import CASES
from scaffolding.proofs import proven
from scaffolding.small import batch, mlp


class Root(nn.Module):
    """NaN below zero; at zero, a gradient that is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Block(nn.Module):
    """Where `offset` is a number, the root is taken of that number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.root = nn.Linear(9, 9), Root()
        self.offset: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.offset is None else self.root(x * 0 + self.offset)


class Glue(nn.Module):
    """Blocks, and between them calls of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.bad and index == 1:
                x = torch.log(x - x.square() - 1)  # the line that is to be named
        return x


LINE = next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("to be named")
)


def step(
    model: nn.Module,
    ranks: int = 2,
    schedule: str = "1f1b",
    loss: Any = F.mse_loss,
    recompute: Any = "never",
    **call: Any,
) -> str:
    """The text of what one step raises."""
    x, y = batch(8)
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule, "loss": loss, "check_finite": True}
    options["recompute"] = recompute
    with penstock.pipeline(model, (x,), ranks=ranks, **options) as pipe:
        with pytest.raises(NonFiniteError) as error:
            pipe.step(call.pop("x", x), target=y, **call)
    return str(error.value)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (4, "zb-h1")])
def test_the_module_inside_of_a_block_is_named(ranks: int, schedule: str) -> None:
    model = Glue()
    model.blocks[2].offset = -1.0
    stage = 2 * ranks // 4
    said = step(model, ranks, schedule)
    assert said.startswith(f"rank {stage}, action {stage}F0, microbatch 0: ")
    assert said.endswith("made by module 'blocks.2.root'")


def test_a_call_of_the_models_own_is_named_by_its_line() -> None:
    model = Glue()
    model.bad = True
    said = step(model, 4)
    assert said.startswith(f"rank 1, action 1F0, microbatch 0: value 'log' (made by {__file__}:{LINE}), which")
    assert f"made by log() at {__file__}:{LINE} in the model's own forward" in said


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-h1", 2)])
def test_a_gradient_names_parameters_values_and_the_module(schedule: str, ranks: int) -> None:
    model = Glue()
    model.blocks[3].offset = 0.0
    stage = 3 * ranks // 4
    said = step(model, ranks, schedule)
    assert said.startswith(f"rank {stage}, action {stage}{'I' if schedule == 'zb-h1' else 'B'}0, microbatch 0: ")
    assert "the gradient of parameter 'blocks.3.linear.weight'" in said
    assert "backward met it first in the gradient of what module 'blocks.3.linear' returned" in said
    if ranks == 4:
        assert "the gradient of value 'blocks_2' (made by module 'blocks.2')" in said


@pytest.mark.parametrize(("schedule", "action"), [("1f1b", "1B1"), ("zb-h1", "1W1")])
def test_a_weights_own_gradient_is_named(schedule: str, action: str) -> None:
    x, _ = batch(8)
    x[2:] *= 1e12  # the first microbatch's backward is not split
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
    model[1].weight.data.mul_(1e-10)
    said = step(model, 2, schedule, loss=lambda output, target: (output * 1e30).sum(), x=x)
    assert said == f"rank 1, action {action}, microbatch 1: the gradient of parameter '1.weight' is not finite"


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (lambda output, target: (output.mean() * 0 - 1).sqrt(), {}, "1F0, microbatch 0: the loss is NaN: "),
        (
            lambda output, target: output.mean() + math.inf,  # whose gradients are finite
            {"schedule": "gpipe", "recompute": "always"},
            "1B0, microbatch 0: the loss is Inf: ",
        ),
    ],
)
def test_the_loss_function_is_named(loss: Any, options: dict[str, Any], words: str) -> None:
    said = step(mlp(), loss=loss, **options)
    assert said == f"rank 1, action {words}the loss function made it of an output that is finite"


@pytest.mark.parametrize(("value", "kind"), [(math.nan, finite.NAN), (-math.inf, finite.INF), (1.0, None)])
def test_gradients_of_a_few_rows_are_looked_at_too(value: float, kind: str | None) -> None:
    weight = nn.Parameter(torch.ones(5, 2))
    (F.embedding(torch.tensor([3, 1, 3]), weight, sparse=True) * torch.tensor([1.0, value])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert finite.nonfinite_kind(weight.grad) == kind


def test_inputs_and_parameters_that_are_bad_already_are_named() -> None:
    x, _ = batch(8)
    x[5] = math.nan
    said = step(mlp(), x=x)
    assert said.startswith(
        "rank 0, action 0F2, microbatch 2: value '_2' (made by module '2'), which leaves stage 0, holds"
    )
    assert said.endswith("what comes in as 'input_1' has it already")
    x[5] = math.inf
    assert step(mlp(), x=x).endswith("made by module '0', out of Inf, made by what comes in as 'input_1'")
    model = mlp()
    model[4].weight.data[3, 3] = math.nan
    said = step(model)
    assert "made by module '4'" in said
    assert said.endswith("Not finite before this action: parameter '4.weight'")


class Masked(nn.Module):
    """Infinities that are meant: in a mask that crosses cuts, and in scores inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.where(x > 0, 0.0, -math.inf)
        for layer in self.layers:
            x = layer(x)
            scores = (x + mask).masked_fill(x > 2, -math.inf)
            x = x + torch.where(scores.isinf(), 0.0, scores)
        return x


@pytest.mark.parametrize(("name", "ranks", "schedule"), [("in_place", 4, "1f1b"), ("masked", 2, "zb-h1")])
def test_looking_changes_nothing(name: str, ranks: int, schedule: str) -> None:
    case = CASES["in_place"]()
    if name == "masked":
        case = case._replace(model=Masked(), args=batch(4)[:1], target=batch(4)[1], loss=F.mse_loss)
    options: dict[str, Any] = {"ranks": ranks, "schedule": schedule, "microbatches": 2, "check_finite": True}
    proven(case.model, *case.args, case.target, case.loss, exact=True, **options)


def test_a_microbatch_that_does_not_count_may_have_any_loss() -> None:
    x, _ = batch(8)
    labels = torch.tensor([1, 2, -100, -100, 3, 4, 5, 6])  # the mean over the second microbatch is NaN
    reduction: Callable[[Tensor], Tensor] = lambda target: (target != -100).sum()  # noqa: E731
    with penstock.pipeline(
        mlp(), (x,), ranks=2, microbatches=4, loss=F.cross_entropy, reduction=reduction, check_finite=True
    ) as pipe:
        assert pipe.step(x, target=labels).loss.isfinite()


def test_infinite_gradients_of_a_scaled_loss_are_the_scalers() -> None:
    model = Glue()
    model.blocks[3].offset = 0.0
    x, y = batch(8)
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss, check_finite=True) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe), torch.optim.SGD(pipe.parameters())
        pipe.step(x, target=y, loss_scale=scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        with pytest.raises(NonFiniteError):
            pipe.step(x, target=y)


def test_what_the_model_raises_keeps_its_text() -> None:
    class Raising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if float(x.detach().flatten()[0]) > 1e3:
                raise ValueError("too large")
            return super().forward(x)

    x, y = batch(8)
    model = nn.Sequential(nn.Linear(9, 9), Raising(9, 9))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss": F.mse_loss, "leaf_modules": ["1"]}
    with penstock.pipeline(model, (x,), check_finite=True, **options) as pipe:
        model[0].bias.data.fill_(1e4)
        with pytest.raises(ValueError, match="too large") as error:
            pipe.step(x, target=y)
    assert error.value.args == ("too large",)
