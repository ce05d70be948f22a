"""What holds a pipeline cannot be copied or written to a file: the error names what can."""

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
from scaffolding.small import batch, mlp

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
