"""Torch's older checkpoint, which is its default, around blocks of a model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import penstock
from scaffolding.models import squared_error
from scaffolding.proofs import proven

Pass = Callable[["Checkpointed", Tensor], Any]


class Checkpointed(nn.Module):
    def __init__(self, forward: Pass) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, x))


def _older(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def _sequential(model: Checkpointed, x: Tensor) -> Any:
    return checkpoint_sequential(nn.Sequential(*model.blocks), 2, model.first(x), use_reentrant=True)


def _closure(model: Checkpointed, x: Tensor) -> Tensor:
    def call(block: nn.Module) -> Callable[..., Any]:
        return lambda x, scale: (block(x) * scale, scale)

    x = model.first(x)
    for block in model.blocks:
        x, _ = _older(call(block), x, 0.5)
    return x


def _no_gradient_enters(model: Checkpointed, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = _older(block, x)  # as torch warns, none of these trains
    return model.first(x)


def _twice(model: Checkpointed, x: Tensor) -> Any:
    return _older(model.first, model.first(x))


def _weight_twice(model: Checkpointed, x: Tensor) -> Any:
    return _older(lambda x: model.first(x) * model.last.weight.sum(), model.first(x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", [_sequential, _closure, _no_gradient_enters])
def test_blocks_in_older_checkpoints_are_exact(way: Pass) -> None:
    proven(lambda: Checkpointed(way), torch.randn(8, 4), torch.randn(8, 4), ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (_twice, r"'first\.weight' is used in .* and outside of it.* use_reentrant=False"),
        (_weight_twice, r"used in .* and outside of it.* use_reentrant=False"),
    ],
)
def test_what_an_older_checkpoint_would_train_otherwise_is_refused(way: Pass, words: str) -> None:
    with pytest.raises(penstock.PartitionError, match=words):
        penstock.pipeline(Checkpointed(way), (torch.randn(8, 4),), loss=squared_error, ranks=2, microbatches=4)
