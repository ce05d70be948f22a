"""Real ranks build one pipeline: all cut where the first one does, and each says by itself what all refuse."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import pipeline
from penstock.costs import Profile, UnitCost
from penstock.distributed.failure_detector import Timeouts
from penstock.partition import NoStreams, Partitioner, choose_cuts
from penstock.partition.measure.pieces import compute_fingerprint
from penstock.partition.recording import Recording
from penstock.runtime.execute.control import Control
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after
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


# -- what every rank refuses, every rank says by itself ---------------------------------------------------------------


BEAT_SECONDS = 0.02
LATE_SECONDS = 0.1
"""In which a rank that seems to wait leaves, if another has failed."""


def _materialize(name: str, module: nn.Module) -> None:
    if dist.get_rank() == 0:
        raise penstock.ArgumentError(f"no values for {name}")


CASES: dict[str, dict[str, Any]] = {
    "cuts": {"cuts": ["no such module"]},
    "copies": {"schedule": "chimera", "parallelize": lambda stage: None},
    "compiled": {"compile": {"backend": "eager"}, "parallelize": lambda stage: None},
    "keepings": {"recompute": {7: "always"}},
    "one rank": {"materialize": _materialize},
}


@contextmanager
def _late(control: Control, what: str, peers: tuple[int, ...]) -> Iterator[None]:
    """As `waiting_for`, of a process that is slow to go on."""
    with _waiting_for(control, what, peers):
        yield
        time.sleep(LATE_SECONDS)


_waiting_for = Control.waiting_for


def refused(rank: int, case: str) -> tuple[str, float]:
    """What this rank says, and after how many seconds."""
    torch.manual_seed(0)
    with torch.device("meta" if case == "one rank" else "cpu"):
        model = [nn.Linear(4, 4) for _ in range(4)]
    slow = rank == dist.get_world_size() - 1
    x = torch.randn(8, 4)
    begin = time.monotonic()
    with (
        patch("penstock.pipe.build.Timeouts", partial(Timeouts, beat_seconds=BEAT_SECONDS)),
        patch.object(Control, "waiting_for", _late if slow else _waiting_for),
    ):
        try:
            penstock.pipeline(model, (x,), loss=squared_error, microbatches=4, **CASES[case])
        except penstock.PenstockError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("case", long_after(1, *(case for case in CASES if case != "one rank")))
def test_every_rank_raises_its_own_refusal(ranks2: Ranks, case: str) -> None:
    first, *others = ranks2.run(refused, case)
    assert first[0].startswith(("ArgumentError", "PartitionError"))
    assert all(said.split(" for stage ")[0] == first[0].split(" for stage ")[0] for said, _ in others)


def test_what_one_rank_refuses_ends_the_others_with_its_words(ranks2: Ranks) -> None:
    (own, _), (other, seconds) = ranks2.run(refused, "one rank")
    assert own == "ArgumentError: no values for 0"
    assert other == f"RankFailedError: rank 1 stops: rank 0 failed outside of a step: {own}"
    assert seconds < 10
