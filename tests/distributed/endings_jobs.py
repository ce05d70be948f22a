"""What is left of a pipeline that was closed."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import jobs
import mesh_jobs

import penstock
from penstock import checkpoint
from scaffolding.refusals import refusal_of

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
