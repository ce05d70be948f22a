"""Where ranks would cut at different places, all cut where the first one does."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import pipeline
from penstock.costs import Profile, UnitCost
from penstock.partition import NoStreams, Partitioner, choose_cuts
from penstock.partition.measure.pieces import compute_fingerprint
from penstock.partition.recording import Recording
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.small import batch

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.layer, self.is_slow = nn.Linear(9, 9), is_slow

    def forward(self, x: Tensor) -> Tensor:
        if self.is_slow:
            square = torch.ones(256, 256)
            x = x + (square @ square)[0, 0] * 0
        return torch.tanh(self.layer(x))


def model(rank: int) -> nn.Module:
    """On rank 0 the last block is slow, on the others the first two."""
    torch.manual_seed(0)
    slow = {5} if rank == 0 else {0, 1}
    return nn.Sequential(*(Block(index in slow) for index in range(6)))


def cuts(rank: int) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Where this rank would cut by itself, where it does, and the loss."""
    x, y = batch(4)
    own = Partitioner(model(rank), 2, streams=NoStreams())((x,)).cuts
    with penstock.pipeline(model(rank), (x,), microbatches=2, loss=F.mse_loss) as pipe:
        loss = pipe.step(x, target=y).loss
        return own, pipe.cuts, float(loss)


def cuts_by_time(rank: int) -> tuple[tuple[str, ...], int, float]:
    """Where this rank cuts, how often it measured, and the loss. Each rank would find another half slow."""
    slow = {str(index) for index in (range(4, 6) if rank == 0 else range(4))}
    calls = []

    def measured(recording: Recording, model: nn.Module, *_: Any) -> Profile:
        calls.append(rank)
        of = compute_fingerprint(model, "cpu")
        units = tuple(UnitCost(name, 2.0 if name in slow else 1.0, 0.0, 0.0) for name in map(str, range(6)))
        return Profile(units, "cpu", of.dtype, of.parameters)

    x, y = batch(4)
    with patch.multiple(choose_cuts, MIN_MEASURED_WORK=0, measure=measured):
        with penstock.pipeline(model(0), (x,), microbatches=2, loss=F.mse_loss, balance="time") as pipe:
            return pipe.cuts, len(calls), float(pipe.step(x, target=y).loss)


def overlap(rank: int, beside: bool) -> str:
    """What is said of a head that has a parameter of its own in the memory of the embedding, transposed, or beside it:
    both are columns of one matrix."""
    layers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    weight = layers[0].weight.data
    layers[2].weight.data = weight.t()
    if beside:
        layers[0].weight.data, layers[2].weight.data = torch.cat([weight, weight], 1).chunk(2, 1)
    return refusal_of(penstock.pipeline, layers, batch(4)[:1], microbatches=2, loss=F.mse_loss)


def test_all_ranks_cut_where_the_first_one_does(ranks2: Ranks) -> None:
    (first, here, loss), (second, there, other_loss) = ranks2.run(cuts)
    assert first != second
    assert here == there == first
    x, y = batch(4)
    assert loss == other_loss == pytest.approx(F.mse_loss(model(0)(x), y).item())


def test_the_first_rank_alone_measures_and_all_cut_there(ranks2: Ranks) -> None:
    (first, measured, loss), (second, also_measured, other_loss) = ranks2.run(cuts_by_time)
    assert first == second == ("4",)
    assert (measured, also_measured) == (1, 0)
    assert loss == other_loss


def test_two_parameters_in_the_same_memory_are_refused_where_processes_would_update_each_alone(ranks2: Ranks) -> None:
    for said in ranks2.run(overlap, False):
        assert "'0.weight' on stage 0 and '2.weight' on stage 1 are two parameters in the same memory" in said
    assert ranks2.run(overlap, True) == ["", ""]
    layers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    layers[2].weight = nn.Parameter(layers[0].weight.data)
    x, y = batch(4)
    with pipeline(layers, (x,), ranks=2, microbatches=2, loss=F.mse_loss) as pipe:  # one process is one device
        pipe.step(x, target=y)
