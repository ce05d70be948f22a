"""What a block does and returns only for some values: kept equal to plain torch, or refused with the block's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import PartitionError, pipeline
from penstock.partition.record import run_for_real
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.models import squared_error

WIDTH = 6
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
TARGET = torch.zeros(8, WIDTH)


class Block(nn.Module):
    """`and_else(self, x)` is returned beside the result."""

    def __init__(self, and_else: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.and_else, self.calls = nn.Linear(WIDTH, WIDTH), and_else, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        self.calls += 1
        return torch.tanh(self.linear(x)), self.and_else(self, x.detach())


class Uses(nn.Module):
    """`uses(x, what)` is made of what each block returns."""

    def __init__(self, and_else: Callable[[Any, Tensor], Any], uses: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(and_else) for _ in range(4))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.uses(*block(x))
        return x


def positive(_: Any, x: Tensor) -> int:
    return int((x > 0).sum())


@dataclass
class Seen:
    mean: float


CHANGING = {
    "number": (positive, lambda x, n: x * (n / 10), r"returned \d+ at \[1\] where the recording has \d+"),
    "counter": (lambda block, x: block.calls, lambda x, n: x * n, r"returned 2 at \[1\] where the recording has 1 at"),
    "under tuples": (lambda _, x: {("mean", 0): x.mean().item()}, lambda x, d: x * d["mean", 0], r"returned -?0\."),
    "length": (lambda _, x: [x] * positive(_, x), lambda x, y: x + sum(y) * 0.1, "returned .*nothing more"),
    "none": (
        lambda _, x: None if x.sum() > 0 else x,
        lambda x, y: x if y is None else x + y,
        r"returned (None|a tensor of shape \(2, 6\)) at \[1\] where the recording has (None|a tensor)",
    ),
    "shape": (
        lambda _, x: x[x.sum(1) > 0],
        lambda x, y: x + y.sum() / (y.shape[0] + 1),
        r"returned a tensor of shape \(\d, 6\) at \[1\] where the recording has a tensor of shape",
    ),
}


@pytest.mark.parametrize("case", CHANGING)
def test_what_a_block_returns_beside_tensors_is_checked(case: str) -> None:
    torch.manual_seed(0)
    and_else, uses, message = CHANGING[case]
    model = Uses(and_else, uses)
    with pipeline(model, (X,), ranks=1, microbatches=4, loss=squared_error) as pipe:
        with pytest.raises(PartitionError, match=rf"'blocks\.\d' {message}") as caught:
            pipe.step(X, target=TARGET)
    assert "leaf_modules=" in str(caught.value)


def test_who_rests_on_a_shape_is_named_with_a_remedy_that_works() -> None:
    torch.manual_seed(0)
    and_else, uses, _ = CHANGING["shape"]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Uses(and_else, uses))
    with pipeline(model, (X,), ranks=1, microbatches=4, loss=squared_error, split_inside=["1"]) as pipe:
        with pytest.raises(
            PartitionError, match=rf"\(as at {__file__}:\d+, in module '1'\). Pass leaf_modules=\['1'\]"
        ):
            pipe.step(X, target=TARGET)
    with pipeline(model, (X,), ranks=1, microbatches=4, loss=squared_error, leaf_modules=["1"]) as pipe:
        pipe.step(X, target=TARGET)


def uses_them(x: Tensor, found: tuple[Any, ...]) -> Tensor:
    array, numbers, device, seen, by_tuple = found
    return x.to(device) * int(array[2]) * max(numbers) * seen.mean + by_tuple[0, 1]


UNCHANGING = {
    "not a number": lambda: Uses(lambda _, x: (float("nan"), "tanh", None), lambda x, y: getattr(x, y[1])()),
    "other values": (lambda: Uses(lambda _, x: (np.arange(3), {1, 2}, x.device, Seen(0.5), {(0, 1): x}), uses_them)),
}


@pytest.mark.parametrize("case", UNCHANGING)
def test_what_does_not_change_is_kept_equal(case: str) -> None:
    check(UNCHANGING[case](), ranks=2)


def check(model: nn.Module, rows: int = 7, **options: Any) -> None:
    reference = copy.deepcopy(model)
    with pipeline(model, (X[:rows],), microbatches=4, loss=squared_error, **options) as pipe:
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            expected = step_by_hand(reference, (X[:rows],), TARGET[:rows], squared_error, 4)
            assert torch.equal(pipe.step(X[:rows], target=TARGET[:rows]).loss, expected.total)
            assert_same_gradients(model, reference)
    for ours, other in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, other)


class Does(nn.Module):
    """Does something to its input or buffer only where its first value is positive."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(WIDTH, WIDTH), what
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x.clone()))
        if float(x.detach()[0, 0]) > 0:
            if self.what == "draw":
                return functional.dropout(y, 0.5)
            (x if self.what == "input" else self.count).add_(1)
        return y


def doing(what: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Does(what) for _ in range(4)))


@pytest.fixture(params=[1, -1], ids=["seen", "unseen"])
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of the values with which a block is recorded: it does it then, or not."""
    make = run_for_real._make_stand_in

    def making(fake: Tensor, original: Tensor | None, device: torch.device) -> Tensor:
        made = make(fake, original, device)
        with torch.no_grad():
            return made if original is not None else made.copy_(made.abs() * request.param)

    monkeypatch.setattr(run_for_real, "_make_stand_in", making)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("options", [{"recompute": "always"}, {"recompute": 1}], ids=str)
def test_a_buffer_that_is_updated_for_some_values_is_updated_once(options: dict[str, Any]) -> None:
    check(doing("update"), ranks=2, **options)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("options", [{"recompute": 1}, {"schedule": "zb-h1"}], ids=str)
def test_draws_made_for_some_values_do_not_depend_on_the_stages(options: dict[str, Any]) -> None:
    losses = []
    for ranks, given in ((1, {}), (3, options)):
        model = doing("draw")
        with pipeline(model, (X,), ranks=ranks, microbatches=4, loss=squared_error, seed=3, **given) as pipe:
            losses.append(pipe.step(X, target=TARGET).loss)
        losses.append(model[0].linear.weight.grad.sum())
    assert losses[:2] == losses[2:]


class Over(nn.Module):
    """The result of the first layer skips the block that updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Does("input"), *(nn.Linear(WIDTH, WIDTH) for _ in "ab"))

    def forward(self, x: Tensor) -> Tensor:
        first, does, *others = self.layers
        y = first(x)
        z = does(y)
        for layer in others:
            z = layer(z)
        return z + y


@pytest.mark.usefixtures("made_up")
def test_an_input_that_is_updated_for_some_values_is_kept_equal(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    check(copy.deepcopy(model := Over()), ranks=1)
    if "unseen" not in request.node.name:  # what the recording did not see is not followed
        check(model, ranks=4, schedule="1f1b")
