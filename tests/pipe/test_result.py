"""What a step gives back, as it is printed."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.pipe.result import StepResult
from penstock.runtime.step.shared_loss import SharedLoss
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp


def test_printing_shows_the_loss() -> None:
    x, y = batch(5)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        result = pipe.step(x, target=y)
        assert repr(result) == f"StepResult(loss={float(result.loss):.6g}, sizes=(3, 2))"
        assert repr(StepResult(sizes=(3, 2))) == "StepResult(loss=none here, sizes=(3, 2))"


def test_printing_waits_for_nobody() -> None:
    loss = SharedLoss([[torch.tensor(1.5)]])
    loss.waits.append(lambda: pytest.fail("waited"))
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=under way, sizes=())"
    loss.waits.clear()
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=1.5, sizes=())"
