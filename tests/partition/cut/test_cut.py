"""Balanced cuts, which separate nothing that the forward updates in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, inspect, verify
from penstock.partition import NoStreams, Partitioner
from scaffolding.models import Forward, gpt


def test_balance_by_layers_shares_the_blocks() -> None:
    case = gpt()
    made = Partitioner(case.model, 2, streams=NoStreams(), balance="layers")(case.args)
    assert made.cuts == ("h.2",)


def wide(frozen: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[:frozen].requires_grad_(False)
    return model


@pytest.mark.parametrize("frozen", [0, 2])
def test_balance_by_parameters(frozen: int) -> None:
    """Frozen ones take memory, and work in the forward."""
    made = Partitioner(wide(frozen), 2, streams=NoStreams(), balance="parameters")((torch.randn(1, 4),))
    assert made.cuts == ("1",)


def test_wrappers_are_descended_into() -> None:
    case = gpt()
    model = nn.Sequential(case.model, nn.Linear(19, 2))
    made = Partitioner(model, 3, ["0.h.1", "0.h.3"], streams=NoStreams())(case.args)
    assert [len(s.meta.parameters) > 0 for s in made.stages] == [True] * 3


def test_more_stages_than_layers_are_refused_in_words_that_fit() -> None:
    single, one = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"this Linear calls no module that a stage could begin with. Use 1 stage"):
        Partitioner(single, 2, streams=NoStreams())((torch.randn(1, 4),))
    with pytest.raises(PartitionError, match=r"has only 1 layer to share among them. Use at most 1 stage$"):
        Partitioner(one, 2, streams=NoStreams())((torch.randn(1, 4),))


# -- nothing is separated that the forward updates in place ------------------------------------------------------------


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


def test_an_encoder_with_batch_norm_for_two_views_is_cut_around_it() -> None:
    x = torch.randn(8, WIDTH)
    options = {"ranks": 4, "microbatches": 4, "schedule": "1f1b"}
    verify(Siamese(), (x, x + 1), loss_fn=lambda output: output.square().mean(), **options).raise_if_failed()
    assert inspect(Siamese(), (x, x + 1), stages=4, microbatches=4).stages[1].first_module != "encoder.2"


def test_what_is_used_from_beginning_to_end_leaves_one_stage() -> None:
    def counting(self: Any, x: Tensor) -> Tensor:
        self.steps += 1
        return self.second(self.first(x)) * self.steps

    model = Forward(counting, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))
    model.register_buffer("steps", torch.zeros(()))
    with pytest.raises(PartitionError, match=r"'steps' is updated in place.* leaves 1 stage at most"):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)
