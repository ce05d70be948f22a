"""What a step gives back, as it is printed; what holds a pipeline cannot be copied, and the error names what can."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.step.results import SharedLoss, StepResult
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp


def test_printing_shows_the_loss() -> None:
    x, y = batch(5)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        result = pipe.step(x, target=y)
        assert repr(result) == f"StepResult(loss={float(result.loss):.6g}, sizes=(3, 2))"
        assert repr(StepResult(sizes=(3, 2))) == "StepResult(loss=none here, sizes=(3, 2))"
        with pytest.raises(TypeError, match=r"no tuple: read result\.loss"):
            _loss, _outputs = result


def test_printing_waits_for_nobody() -> None:
    loss = SharedLoss([torch.tensor(1.5)])
    loss.waits.append(lambda: pytest.fail("waited"))
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=under way, sizes=())"
    loss.waits.clear()
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=1.5, sizes=())"


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_holds_a_pipeline_names_what_can_be_copied(way: str) -> None:
    holder = nn.Module()
    holder.pipe = penstock.pipeline(mlp(), batch()[:1], loss_fn=nn.functional.mse_loss, ranks=2, microbatches=2)
    with holder.pipe, pytest.raises(penstock.ArgumentError, match=r"cannot be copied or pickled.*AveragedModel"):
        WAYS[way](holder)
