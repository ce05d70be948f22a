"""What a rank gives back: memory of other stages at once, and at the end no sooner than its neighbors have all, but
then its threads, too."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        assert said == "PipelineClosedError: this pipeline was closed; make a new one"
