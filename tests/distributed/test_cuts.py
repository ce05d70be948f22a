"""Where ranks would cut at different places, all cut where the first one does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distributed.cuts_jobs import Towers, cuts, cuts_by_time, model, overlap, towers
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


def test_all_run_modules_in_the_order_that_the_first_one_finds(ranks2: Ranks) -> None:
    (stages, loss, first), (same, also, second) = ranks2.run(towers)
    assert stages == same
    assert [{name.rsplit(".", 1)[0] for name in stage} for stage in stages] == [
        {"left.0", "right.0"},
        {"left.1", "right.1"},
    ]
    plain = Towers()
    for part in batch(4)[0].split(2):
        F.mse_loss(plain(part.clone()), torch.zeros(2, 9)).backward(torch.tensor(0.5))  # type: ignore[no-untyped-call]
    assert loss == also
    gradients = first | second
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("turned", [False, True])
def test_two_parameters_in_the_same_memory_are_refused_where_processes_would_update_each_alone(
    ranks2: Ranks, turned: bool
) -> None:
    for said in ranks2.run(overlap, turned):
        assert "'0.weight' on stage 0 and '2.weight' on stage 1 are two parameters in the same memory" in said
    layers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    layers[2].weight = nn.Parameter(layers[0].weight.data)
    x, y = batch(4)
    with pipeline(layers, (x,), ranks=2, microbatches=2, loss=F.mse_loss) as pipe:  # one process is one device
        pipe.step(x, target=y)
