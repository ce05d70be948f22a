"""A loss function is called once for each microbatch, in their order if it matters, also where the last stage's forward
runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.schedule import Schedule, from_csv
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.small import batch, mlp


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_forward_that_runs_again_calls_the_loss_once(schedule: str) -> None:
    """A loss may count its calls, or write into its target."""
    calls: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(calls))
        return (output - target.sub_(1)).square().mean() * len(calls)

    model, reference, (x, y) = mlp(), mlp(), batch()
    with penstock.pipeline(
        model, (x,), ranks=2, schedule=schedule, microbatches=3, loss=counted, recompute="always"
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y.clone())
    assert len(calls) == 6
    calls.clear()
    for _ in range(2):
        step_by_hand(reference, (x,), y.clone(), counted, 3)
    assert_same_gradients(model, reference)


class Centred(nn.Module):
    """As the loss of DINO: takes a moving average away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))
        self.seen = 0.0  # what it notes for others to look at

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target - self.center.clone()).square().mean()
        self.center.lerp_(output.detach().mean(), 0.5)
        self.seen = loss.item()
        return loss


class Warming(nn.Module):
    calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (output - target).square().mean() * self.calls


class Noting(nn.Module):
    """Changes nothing that it reads."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target).square().mean()
        self.last, self.value = output, loss.item()
        return loss


def within(loss: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    return lambda output, target: loss(output, target) + 0


STATEFUL = pytest.mark.parametrize("kind", [Centred, Warming])


@STATEFUL
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_loss_that_keeps_state_is_called_in_order(kind: type[nn.Module], schedule: str) -> None:
    model, reference, (x, y) = mlp(), mlp(), batch()
    with penstock.pipeline(model, (x,), ranks=2, schedule=schedule, microbatches=4, loss=kind()) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    loss = kind()
    for _ in range(2):
        step_by_hand(reference, (x,), y, loss, 4)
    assert_same_gradients(model, reference)


@STATEFUL
@pytest.mark.parametrize("given", [lambda loss: loss, within, lambda loss: loss.forward], ids=["it", "within", "bound"])
def test_two_copies_of_the_last_stage_would_each_keep_their_own(
    kind: type[nn.Module], given: Callable[..., Any]
) -> None:
    (x, y), loss = batch(), kind()
    with (
        penstock.pipeline(mlp(), (x,), ranks=2, schedule="dualpipe", microbatches=4, loss=given(loss)) as pipe,
        pytest.raises(
            penstock.ArgumentError, match=r"updates its '(center|calls)'.* 2 copies of the last stage.*dualpipe-v"
        ),
    ):
        pipe.step(x, target=y)


class Kept:
    """A loss that is no module, whose state is in `self.kept`."""

    shared = 0

    def __init__(self) -> None:
        self.kept: Any = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() * self.factor(output)

    def factor(self, output: Tensor) -> Any:
        raise NotImplementedError


class KeepsCount(Kept):
    def factor(self, output: Tensor) -> Any:
        self.kept = (self.kept or 0) + 1
        return self.kept


class KeepsAverage(Kept):
    def factor(self, output: Tensor) -> Any:
        self.kept = 0.9 * (self.kept or 1.0) + 0.1 * output.mean().item()
        return self.kept


class KeepsFirst(Kept):
    """Only its first call sets anything, and returns the same whether or not that was set before."""

    def factor(self, output: Tensor) -> Any:
        mean = output.detach().mean()
        if self.kept is None:
            self.kept = mean
        return mean / self.kept


class KeepsTensor(Kept):
    def factor(self, output: Tensor) -> Any:
        mean = output.detach().mean()
        self.kept = mean if self.kept is None else 0.9 * self.kept + 0.1 * mean
        return self.kept


class KeepsList(Kept):
    def factor(self, output: Tensor) -> Any:
        self.kept = self.kept or []
        self.kept.append(1)
        return len(self.kept)


class KeepsModule(Kept):
    def factor(self, output: Tensor) -> Any:
        self.kept = self.kept or Warming()
        return self.kept(output, output) + self.kept.calls


class KeepsArray(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.kept = np.zeros(1)

    def factor(self, output: Tensor) -> Any:
        self.kept += 1
        return float(self.kept[0])


class KeepsInClass(Kept):
    def factor(self, output: Tensor) -> Any:
        type(self).shared += 1
        return self.shared


class KeepsQueue(Kept):
    def __init__(self) -> None:
        self.kept = torch.ones(2)

    def factor(self, output: Tensor) -> Any:
        factor = self.kept.sum().clone()
        self.kept[0] = output.detach().mean()
        return factor


def in_closure() -> Any:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (output - target).square().mean() * calls

    return loss


def on_function() -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return (output - target).square().mean() * loss.calls  # type: ignore[attr-defined, no-any-return]

    loss.calls = 0  # type: ignore[attr-defined]
    return loss


KEEPING = [
    *(KeepsCount, KeepsAverage, KeepsFirst, KeepsTensor, KeepsList, KeepsModule, KeepsArray, KeepsInClass, KeepsQueue)
]


@pytest.mark.parametrize("make", [*KEEPING, in_closure, on_function, lambda: KeepsCount().__call__])
def test_state_anywhere_is_refused_under_two_copies_of_the_last_stage(make: Callable[[], Any]) -> None:
    x, y = batch()
    with (
        penstock.pipeline(mlp(), (x,), ranks=2, schedule="dualpipe", microbatches=4, loss=make()) as pipe,
        pytest.raises(penstock.ArgumentError, match=r"updates its '\w+'.* 2 copies of the last stage.*dualpipe-v"),
    ):
        pipe.step(x, target=y)


def test_a_history_that_nothing_reads_is_no_state_either() -> None:
    (x, y), history, noted = batch(), list[float](), KeepsCount()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output - target).square().mean()
        history.append(value.item())
        noted.kept = output
        return value

    with penstock.pipeline(mlp(), (x,), ranks=2, schedule="dualpipe", microbatches=4, loss=loss) as pipe:
        pipe.step(x, target=y)
    assert len(history) == 4, "what the calls that compare have added is taken out again"


def test_what_a_loss_notes_for_others_is_no_state_of_its_own() -> None:
    x, y = batch()
    with penstock.pipeline(mlp(), (x,), ranks=2, schedule="dualpipe", microbatches=4, loss=Noting()) as pipe:
        pipe.step(x, target=y)


@pytest.mark.parametrize(("kind", "name"), [(Centred, "center"), (KeepsFirst, "kept")])
def test_a_schedule_of_ones_own_may_call_it_in_any_order(kind: Callable[[], Any], name: str) -> None:
    x, y = batch()
    schedule = from_csv("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    with (
        penstock.pipeline(mlp(), (x,), ranks=2, microbatches=2, schedule=schedule, loss=kind()) as pipe,
        pytest.raises(penstock.ArgumentError, match=f"'{name}'.* does not call it in order of microbatch"),
    ):
        pipe.step(x, target=y)


def test_a_split_is_learned_without_a_second_call_of_the_loss() -> None:
    """Where I does not follow on F at once, the last stage runs again, too."""
    calls: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(calls))
        return (output - target).square().mean() * len(calls)

    rows = [" ".join(f"{rank}{op}{k}" for op in "FIW" for k in range(3)) for rank in range(2)]
    order = Schedule.parse(f"split: 3 microbatches, stages on ranks 0 1\nrank 0: {rows[0]}\nrank 1: {rows[1]}")
    model, reference, (x, y) = mlp(), mlp(), batch()
    with penstock.pipeline(model, (x,), ranks=2, schedule=order, loss=counted, recompute="always") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    assert len(calls) == 6
    calls.clear()
    for _ in range(2):
        step_by_hand(reference, (x,), y, counted, 3)
    assert_same_gradients(model, reference)
