"""Real processes with batches in other layouts, and `verify` where one of them is wrong in one step."""

from __future__ import annotations

import layout_jobs
import pytest
import torch

from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


def test_batches_of_graphs_are_verified(ranks2: Ranks) -> None:
    for ok, summary, whole in ranks2.run(layout_jobs.verify_graphs):
        assert ok, summary
        assert whole == "close"


def test_replicas_with_the_batch_in_dimension_1(ranks4: Ranks) -> None:
    for ok, summary in ranks4.run(layout_jobs.replicas):
        assert ok, summary


@pytest.mark.parametrize("job", long_after(1, layout_jobs.train_graphs, layout_jobs.train_and_predict))
def test_changing_batches_are_those_of_one_process(ranks3: Ranks, job: object) -> None:
    """Of tensors, in every run: test_layouts.py, in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = job(0)  # type: ignore[operator]
    finally:
        torch.set_num_threads(threads)
    for rank, found in enumerate(ranks3.run(job)):  # type: ignore[arg-type]
        for mine, other in zip(found[:6], alone[:6], strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))
        if job is layout_jobs.train_graphs:
            assert found[6] == ((True, True), (False, False), (True, True))[rank]
