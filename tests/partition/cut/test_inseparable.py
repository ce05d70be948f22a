"""Cuts that separate nothing which the forward updates in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, inspect, verify

WIDTH = 6


class Siamese(nn.Module):
    """An encoder with batch norm, called for two views."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = self.encoder(self.stem(one)), self.encoder(self.stem(other))
        for head in self.heads:
            one = one + head(other).relu()
        return one


class Counting(nn.Module):
    """Counts its calls at the beginning, and uses the number at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x)
        return x * self.steps


def test_an_encoder_with_batch_norm_for_two_views_is_cut_around_it() -> None:
    x = torch.randn(8, WIDTH)
    report = verify(
        Siamese(),
        (x, x + 1),
        target=None,
        loss_fn=lambda output: output.square().mean(),
        ranks=4,
        microbatches=4,
        schedule="1f1b",
    )
    assert report.ok
    assert inspect(Siamese(), (x, x + 1), stages=4, microbatches=4).stages[1].first_module != "encoder.2"


def test_what_is_used_from_beginning_to_end_leaves_one_stage() -> None:
    with pytest.raises(PartitionError, match=r"'steps' is updated in place.* leaves 1 stage at most"):
        inspect(Counting(), (torch.randn(4, WIDTH),), stages=2)
