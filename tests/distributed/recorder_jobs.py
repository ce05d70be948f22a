"""What ranks run to record a run: a small model, with and without replicas, or a loss that looks on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from mesh_jobs import mesh_of
from torch import Tensor, nn

import penstock
from penstock.trace.runs import RunConfig, read_run
from scaffolding.refusals import refusal_of

X = torch.linspace(-1, 1, 64).view(8, 8)


def pipe_of(run: Any, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return penstock.pipeline(model, (X,), microbatches=2, run_dir=run, **{"loss_fn": nn.functional.mse_loss, **options})


def trained(rank: int, folders: Sequence[str], steps: int, replicas: int = 1) -> list[float]:
    """Trains with a folder for each rank; returns the losses."""
    mesh = mesh_of((replicas, len(folders) // replicas), ("dp", "pp")) if replicas > 1 else None
    with pipe_of(RunConfig(folders[rank], total_steps=100), mesh=mesh) as pipe:
        return [float(pipe.step(X, target=X).loss) for _ in range(steps)]


def looked_at(rank: int, folder: str) -> list[dict[str, Any]]:
    """What the last stage's loss finds in the folder of a run, once rank 0 waits for it."""
    found: list[dict[str, Any]] = []

    def looks(output: Tensor, target: Tensor) -> Tensor:
        until = time.monotonic() + 30
        while rank == 1 and pipe.step_count == 1 and not found and time.monotonic() < until:
            states = read_run(folder).ranks()
            waits = [bool(one.waits_for) for one in states]  # each rank writes its own file now and then
            if [(one.step, bool(one.action)) for one in states] == [(2, True)] * 2 and waits == [True, False]:
                found.extend(state.to_dict() for state in states)
            time.sleep(0.05)
        return nn.functional.mse_loss(output, target)

    with pipe_of(folder, loss_fn=looks) as pipe:
        for _ in range(2):
            pipe.step(X, target=X)
    return found


def refused(rank: int, folder: str | None) -> str:
    """What a pipeline says that is to record."""
    return refusal_of(pipe_of, folder)


def refused_on_one(rank: int, folder: str) -> str:
    """What a pipeline says that records on rank 0 only."""
    return refused(rank, folder if rank == 0 else None)
