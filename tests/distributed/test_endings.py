"""What a rank gives back: memory of other stages at once, and at the end no sooner than its neighbors have all, but
then its threads, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import endings_jobs, jobs
from penstock.runtime.execute.transport_choice import TransportChoice
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


def test_memory_of_other_ranks_stages_is_free(ranks3: Ranks) -> None:
    held = ranks3.run(jobs.memory)
    assert all(sum(rank[parameter] for rank in held) == 1 for parameter in range(len(held[0])))


@pytest.mark.parametrize(("transport", "broadcast_loss"), [("auto", True), ("distributed", False)])
def test_rank_that_is_done_first_fails_nobody(ranks3: Ranks, transport: TransportChoice, broadcast_loss: bool) -> None:
    assert ranks3.run(jobs.end_early, transport, broadcast_loss) == [3, 3, 3]


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.long), "distributed"])
def test_threads_end_with_the_pipeline(ranks4: Ranks, transport: TransportChoice, tmp_path: Path) -> None:
    """A group of gloo polls for as long as it is referred to."""
    seen = ranks4.run(endings_jobs.threads_of_a_closed_pipeline, tmp_path, {"transport": transport})
    for added, left, said in seen:
        assert added >= 3 * 5
        assert left == 0
        assert said == "this pipeline was closed; make a new one"


def test_clipping_over_ranks_is_that_of_one_device(ranks3: Ranks) -> None:
    max_norm = 0.01
    clipped = ranks3.run(jobs.clip, max_norm)
    alone = jobs.mlp()
    assert isinstance(alone.model, torch.nn.Module)
    parts = [part.split(4) for part in (alone.args[0], alone.target)]
    for x, y in zip(*parts, strict=True):
        loss = jobs.squared_error(alone.model(x.clone()), y.clone())
        loss.backward(torch.full_like(loss, 1 / 3))
    norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), max_norm)
    assert all(torch.equal(one, norm) for one, _ in clipped)
    grads = {name: grad for _, held in clipped for name, grad in held.items()}
    for name, parameter in alone.model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(grads[name], parameter.grad), name
