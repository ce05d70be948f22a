"""Steps that would overlap in one process are refused."""

from __future__ import annotations

import threading
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ArgumentError, Pipeline, pipeline

WIDTH = 4


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
