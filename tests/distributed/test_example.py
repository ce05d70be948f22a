"""Ranks that do not run the first stage need no inputs: neither batches nor the example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from distributed.example_jobs import What, both, data, model, nobody, train
from penstock import ArgumentError, pipeline
from scaffolding.ranks import Ranks, RanksError

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("given", ["meta", "nothing"])
def test_the_first_rank_alone_has_the_inputs(ranks2: Ranks, given: What) -> None:
    x, mask, y = data()
    unsplit = model()
    optimizer = torch.optim.SGD(unsplit.parameters(), 0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = [F.mse_loss(unsplit(x[rows], mask[rows]), y[rows]) / 2 for rows in (slice(4), slice(4, 8))]
        for loss in losses:
            loss.backward()
        optimizer.step()
        expected.append(sum(loss.item() for loss in losses))
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
