"""Ranks that do not run the first stage need no inputs: neither batches nor the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, pipeline
from scaffolding.by_hand import step_by_hand
from scaffolding.models import Layers
from scaffolding.ranks import Ranks, RanksError
from scaffolding.refusals import refusal_of
from scaffolding.small import batch

pytestmark = pytest.mark.distributed


What = Literal["meta", "nothing"]


class Masked(Layers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():
            x = x * mask[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Masked(9, 4)


def data() -> tuple[Tensor, Tensor, Tensor]:
    x, y = batch(8)
    return x, torch.tensor([True] * 6 + [False] * 2).roll(1), y


def train(rank: int, given: What) -> tuple[list[float], bool]:
    """The losses of two steps of training, and whether gradients are here."""
    x, mask, y = data()
    examples: dict[What, Any] = {"meta": (x.to("meta"), mask.to("meta")), "nothing": ()}
    example = examples[given] if rank else (x, mask)
    with penstock.pipeline(model(), example, microbatches=2, loss=F.mse_loss) as pipe:
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
            model(), (x[:4], mask[:4]), schedule="dualpipe", microbatches=4, loss=F.mse_loss
        ) as pipe:
            for step in range(2):  # the first is of a new kind
                pipe.step(*(theirs[other] if (rank, step) == (1, at) else (x, mask)), target=y)
    except penstock.PenstockError as error:
        if rank == 1:
            said.write_text(f"{type(error).__name__}: {error}")
        raise  # the run ends, and this process with it if it is in its step: it takes no other job


def nobody(rank: int) -> str:
    """What is said if no rank has an example."""
    return refusal_of(penstock.pipeline, model(), (), microbatches=2, loss=F.mse_loss)


@pytest.mark.parametrize("given", ["meta", "nothing"])
def test_the_first_rank_alone_has_the_inputs(ranks2: Ranks, given: What) -> None:
    x, mask, y = data()
    unsplit = model()
    optimizer = torch.optim.SGD(unsplit.parameters(), 0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        expected.append(float(step_by_hand(unsplit, (x, mask), y, F.mse_loss, 2).total))
        optimizer.step()
    for losses, has_gradients in ranks2.run(train, given):
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
        pipeline(model(), (x.to("meta"), mask.to("meta")), ranks=2, microbatches=2, loss=F.mse_loss)
