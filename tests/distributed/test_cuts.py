"""Where ranks would cut at different places, all cut where the first one does."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from distributed.cuts_jobs import cuts, cuts_by_time, model, overlap
from penstock import pipeline
from scaffolding.ranks import Ranks
from scaffolding.small import batch

pytestmark = pytest.mark.distributed


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


@pytest.mark.parametrize("turned", [False, True])
def test_two_parameters_in_the_same_memory_are_refused_where_processes_would_update_each_alone(
    ranks2: Ranks, turned: bool
) -> None:
    for said in ranks2.run(overlap, turned):
        assert "'0.weight' on stage 0 and '2.weight' on stage 1 are two parameters in the same memory" in said
    assert ranks2.run(overlap, turned, True) == ["", ""]
    layers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    layers[2].weight = nn.Parameter(layers[0].weight.data)
    x, y = batch(4)
    with pipeline(layers, (x,), ranks=2, microbatches=2, loss=F.mse_loss) as pipe:  # one process is one device
        pipe.step(x, target=y)
