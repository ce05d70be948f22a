"""Real ranks build one pipeline: all cut where the first one does, each says by itself what all refuse, and those that
do not run the first stage need no inputs: neither batches nor the example."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, pipeline
from penstock.costs import Profile, UnitCost
from penstock.distributed.failure_detector import Timeouts
from penstock.partition import choose_cuts
from penstock.partition.measure.pieces import compute_fingerprint
from penstock.partition.recording import Recording
from penstock.runtime.execute.control import Control
from scaffolding.by_hand import step_by_hand
from scaffolding.models import Layers, squared_error
from scaffolding.ranks import Ranks, RanksError
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after
from scaffolding.small import batch

pytestmark = pytest.mark.distributed


def cuts_by_time(rank: int) -> tuple[tuple[str, ...], int, float]:
    """Where this rank cuts, how often it measured, and the loss. Each rank would find another half slow."""
    slow = {str(index) for index in (range(4, 6) if rank == 0 else range(4))}
    calls = []

    def measured(recording: Recording, model: nn.Module, *_: Any) -> Profile:
        calls.append(rank)
        of = compute_fingerprint(model, "cpu")
        units = tuple(UnitCost(name, 2.0 if name in slow else 1.0, 0.0, 0.0) for name in map(str, range(6)))
        return Profile(units, "cpu", of.dtype, of.parameters)

    torch.manual_seed(0)
    layers, (x, y) = nn.Sequential(*(nn.Linear(9, 9) for _ in range(6))), batch(4)
    with patch.multiple(choose_cuts, MIN_MEASURED_WORK=0, measure=measured):
        with penstock.pipeline(layers, (x,), microbatches=2, loss=F.mse_loss, balance="time") as pipe:
            return pipe.cuts, len(calls), float(pipe.step(x, target=y).loss)


def overlap(rank: int, how: str) -> str:
    """What is said of a head that has a parameter of its own in the memory of the embedding, or its transpose, or
    beside it: both are columns of one matrix."""
    layers = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9))
    weight = layers[0].weight.data
    layers[2].weight.data = weight.t() if how == "transposed" else weight
    if how == "beside":
        layers[0].weight.data, layers[2].weight.data = torch.cat([weight, weight], 1).chunk(2, 1)
    return refusal_of(penstock.pipeline, layers, batch(4)[:1], microbatches=2, loss=F.mse_loss)


def test_the_first_rank_alone_measures_and_all_cut_there(ranks2: Ranks) -> None:
    (first, measured, loss), (second, also_measured, other_loss) = ranks2.run(cuts_by_time)
    assert first == second == ("4",)
    assert (measured, also_measured) == (1, 0)
    assert loss == other_loss


def test_two_parameters_in_the_same_memory_are_refused_where_processes_would_update_each_alone(ranks2: Ranks) -> None:
    for said in (*ranks2.run(overlap, "the same"), *ranks2.run(overlap, "transposed")):
        assert "'0.weight' on stage 0 and '2.weight' on stage 1 are two parameters in the same memory" in said
    assert ranks2.run(overlap, "beside") == ["", ""]
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


# -- examples and inputs are needed on the first stage's ranks alone --------------------------------------------------


What = Literal["meta", "nothing"]


class Masked(Layers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():
            x = x * mask[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def masked() -> nn.Module:
    torch.manual_seed(0)
    return Masked(9, 4)


def data() -> tuple[Tensor, Tensor, Tensor]:
    x, y = batch(8)
    return x, torch.tensor([True] * 6 + [False] * 2).roll(1), y


def train_given(rank: int, given: What) -> tuple[list[float], bool]:
    """The losses of two steps of training, and whether gradients are here."""
    x, mask, y = data()
    examples: dict[What, Any] = {"meta": (x.to("meta"), mask.to("meta")), "nothing": ()}
    example = examples[given] if rank else (x, mask)
    with penstock.pipeline(masked(), example, microbatches=2, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            inputs = () if rank else (x, mask)
            losses.append(float(pipe.step(*inputs, target=y if pipe.has_outputs else None).loss))
            optimizer.step()
        return losses, all(p.grad is not None for p in pipe.parameters())


def both(rank: int, other: str, at: int, said: Path) -> None:
    """Each rank runs the first stage of a copy; rank 1 is given another batch in this step, and writes what is said."""
    x, mask, y = data()
    theirs = {
        "shape": (x[:6], mask[:6]),
        "dtype": (x, mask.to(torch.int64)),
        "mask": (x, torch.ones_like(mask)),
        "strides": (x.T.contiguous().T, mask),
    }
    try:
        with penstock.pipeline(
            masked(), (x[:4], mask[:4]), schedule="dualpipe", microbatches=4, loss=F.mse_loss
        ) as pipe:
            for step in range(2):  # the first is of a new kind
                pipe.step(*(theirs[other] if (rank, step) == (1, at) else (x, mask)), target=y)
    except penstock.PenstockError as error:
        if rank == 1:
            said.write_text(f"{type(error).__name__}: {error}")
        raise  # the run ends, and this process with it if it is in its step: it takes no other job


def nobody(rank: int) -> str:
    """What is said if no rank has an example."""
    return refusal_of(penstock.pipeline, masked(), (), microbatches=2, loss=F.mse_loss)


@pytest.mark.parametrize("given", ["meta", "nothing"])
def test_the_first_rank_alone_has_the_inputs(ranks2: Ranks, given: What) -> None:
    x, mask, y = data()
    unsplit = masked()
    optimizer = torch.optim.SGD(unsplit.parameters(), 0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        expected.append(float(step_by_hand(unsplit, (x, mask), y, F.mse_loss, 2).total))
        optimizer.step()
    for losses, has_gradients in ranks2.run(train_given, given):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert has_gradients


@pytest.mark.parametrize(("other", "at"), [("shape", 0), ("dtype", 1), ("mask", 1), ("strides", 0)])
def test_both_copies_get_the_same_batch(ranks2: Ranks, tmp_path: Path, other: str, at: int) -> None:
    with pytest.raises(RanksError) as failure:
        ranks2.run(both, other, at, tmp_path / "said")
    assert (tmp_path / "said").exists(), failure.value
    said = (tmp_path / "said").read_text()
    assert said.startswith("ShapeError: rank 1 got another batch than rank 0: microbatches of [")


def test_examples_that_nobody_has(ranks2: Ranks) -> None:
    for said in ranks2.run(nobody):
        assert "example: no tensor with rows was given" in said
    x, mask, _ = data()
    with pytest.raises(ArgumentError, match="on the meta device"):
        pipeline(masked(), (x.to("meta"), mask.to("meta")), ranks=2, microbatches=2, loss=F.mse_loss)
