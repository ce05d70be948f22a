"""What a rank gives back: memory of other stages at once, and at the end no sooner than its neighbors have all, but
then its threads, too."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import mesh_jobs
import pytest

import penstock
from distributed import jobs
from penstock import checkpoint
from penstock.runtime.execute.transport_choice import TransportChoice
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of

pytestmark = pytest.mark.distributed


SECONDS = 5.0
"""How long threads may take to end: rank 0's serves the others until they have left."""


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_of_a_closed_pipeline(rank: int, folder: Path, options: dict[str, Any]) -> tuple[int, int, str]:
    """How many threads two replicas with a tie, which save in the background, add to this process; how many of them are
    left once the pipeline is closed, which this function still holds; and what asking the others then says.

    Nothing collects what refers to itself.
    """
    mesh = mesh_jobs.mesh_of((2, 2), ("dp", "pp"))
    task = jobs.tied_gpt()
    gc.collect()
    gc.disable()
    try:
        before = threads()
        with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=3, mesh=mesh, **options) as pipe:
            result = pipe.step(*task.args, target=task.target)
            checkpoint.save(folder, pipe, blocking=False)
            within = threads()
        end = time.monotonic() + SECONDS
        while threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        left = threads() - before
        assert result.loss.isfinite()  # not read before: what brings it is over as well
        return within - before, left, refusal_of(pipe.all_gather_object, rank)
    finally:
        gc.enable()


def test_memory_of_other_ranks_stages_is_free(ranks3: Ranks) -> None:
    held = ranks3.run(jobs.memory)
    assert all(sum(rank[parameter] for rank in held) == 1 for parameter in range(len(held[0])))


@pytest.mark.parametrize(("transport", "broadcast_loss"), [("auto", True), ("distributed", False)])
def test_rank_that_is_done_first_fails_nobody(ranks3: Ranks, transport: TransportChoice, broadcast_loss: bool) -> None:
    assert ranks3.run(jobs.end_early, transport, broadcast_loss) == [3, 3, 3]


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.long), "distributed"])
def test_threads_end_with_the_pipeline(ranks4: Ranks, transport: TransportChoice, tmp_path: Path) -> None:
    """A group of gloo polls for as long as it is referred to."""
    seen = ranks4.run(threads_of_a_closed_pipeline, tmp_path, {"transport": transport})
    for added, left, said in seen:
        assert added >= 3 * 5
        assert left == 0
        assert said == "PipelineClosedError: this pipeline was closed; make a new one"
