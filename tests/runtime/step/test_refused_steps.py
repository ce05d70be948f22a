"""A step that raises, whatever the reason, leaves no trace in one process; steps that would overlap are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ArgumentError, PartitionError, Pipeline, pipeline
from scaffolding.small import WIDTH

LONG = 5


class Changes(nn.Module):
    """In a microbatch with a long sample it does something that the first one did not show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.calls, self.how = nn.Parameter(torch.eye(5)), 0, how
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("often", torch.zeros(1))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.calls += 1
        out = F.linear(x, self.weight)
        if int(lengths.max()) < LONG:
            return out
        self.often += 1
        if self.how == "replaces":
            self.seen = self.seen + 1
        if self.how == "stops":
            raise KeyboardInterrupt
        return out


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.norm, self.noise = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.block, self.last = Changes(how), nn.Linear(5, 5)
        self.last.weight = self.first.weight  # other stages have given their terms of its gradient

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.last(self.noise(self.block(self.norm(self.first(x)), lengths)))
        return out


class Counts(nn.Module):
    """A loss with a moving average."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: tuple[Tensor, Tensor]) -> Any:
        self.mean += output.detach().mean()
        values, lengths = target
        if int(lengths.max()) == LONG and self.how == "loss":
            raise ValueError("the loss fails")
        loss = F.mse_loss(output, values)
        return (loss, loss.detach()) if int(lengths.max()) == LONG and self.how == "parts" else loss


def state(pipe: Pipeline, model: nn.Module, loss: nn.Module) -> dict[str, Any]:
    """All that a step may change."""
    parts = {"model": model, "loss": loss}
    tensors = {f"{k}.{n}": t.clone() for k, part in parts.items() for n, t in part.state_dict().items()}
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    plain = {"calls": model.block.calls, "steps": pipe.step_count, "scale": pipe.loss_scale}
    return {**tensors, **gradients, **plain, "generator": torch.get_rng_state()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        alike = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert alike, name


CASES = {
    "replaces": ("1f1b", PartitionError, "replaced buffer"),
    "stops": ("interleaved-1f1b", KeyboardInterrupt, None),
    "loss": ("1f1b", ValueError, "the loss fails"),
    "parts": ("gpipe", ArgumentError, "besides its loss"),
}


@pytest.mark.parametrize("how", CASES)
@pytest.mark.parametrize("accumulated", [False, True], ids=["first", "accumulated"])
def test_a_step_that_raises_leaves_everything_as_it_was(how: str, accumulated: bool) -> None:
    schedule, error, words = CASES[how]
    torch.manual_seed(0)
    x, short = torch.randn(16, 5), torch.ones(16, dtype=torch.long)
    long = torch.tensor([1] * 8 + [LONG] * 8)

    def train(refused: Callable[[Pipeline, nn.Module, nn.Module], None]) -> dict[str, Any]:
        torch.manual_seed(1)
        model, loss = Model(how), Counts(how)
        options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": schedule, "loss_fn": loss, "seed": 7}
        with pipeline(model, (x, short), leaf_modules=["block"], **options) as pipe:
            pipe.step(x, short, target=(x, short), loss_scale=2.0)
            if not accumulated:
                model.zero_grad()
            refused(pipe, model, loss)
            pipe.step(x, short, target=(x, short))
            return state(pipe, model, loss)

    def refuse(pipe: Pipeline, model: nn.Module, loss: nn.Module) -> None:
        before, gradients = state(pipe, model, loss), [p.grad for p in model.parameters()]
        with pytest.raises(error, match=words) as caught:
            pipe.step(x, long, target=(x, long))
        assert_same(state(pipe, model, loss), before)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
        assert not any("zero_grad" in note for note in getattr(caught.value, "__notes__", ()))

    assert_same(train(refuse), train(lambda *_: None))


# -- steps that would overlap in one process ---------------------------------------------------------------------------


def model_of() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(3)])


X, Y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)


class Loss:
    """Runs something in its next call."""

    def __init__(self) -> None:
        self.acts = list[str]()
        self.pipe: Pipeline | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        while self.pipe is not None and self.acts:
            getattr(self.pipe, self.acts.pop())(X, target=Y)
        return F.mse_loss(output, target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_step_within_its_own_step_is_refused(schedule: str) -> None:
    loss = Loss()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    with pipeline(model, (X,), loss_fn=loss, ranks=2, schedule=schedule, microbatches=2, seed=0) as pipe:
        loss.pipe = pipe
        pipe.step(X, target=Y)
        wanted = [deepcopy(p.grad) for p in model.parameters()]
        for allowed in (False, True):
            model.zero_grad()
            loss.acts = ["evaluate" if allowed else "step"]
            if allowed:
                pipe.step(X, target=Y)
            else:
                with pytest.raises(ArgumentError, match="within its own step"):
                    pipe.step(X, target=Y)
    assert all(map(torch.equal, (p.grad for p in model.parameters()), wanted))


def test_a_step_while_another_thread_is_in_one_is_refused() -> None:
    begun, done = threading.Event(), threading.Event()
    slow = threading.Event()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if slow.is_set():
            begun.set()
            done.wait(60)
        return F.mse_loss(output, target)

    one = pipeline(model_of(), (X,), loss_fn=loss, ranks=2, microbatches=2)
    other = pipeline(model_of(), (X,), loss_fn=F.mse_loss, ranks=2, microbatches=2)
    one.step(X, target=Y)
    slow.set()
    thread = threading.Thread(target=lambda: one.step(X, target=Y))
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(ArgumentError, match="another thread"):
            other.step(X, target=Y)
        with pytest.raises(ArgumentError, match="another thread"):
            pipeline(model_of(), (X,), loss_fn=F.mse_loss, ranks=2, microbatches=2)
    finally:
        done.set()
        thread.join()
    other.step(X, target=Y)
    for pipe in (one, other):
        pipe.close()
