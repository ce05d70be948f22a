"""Training that is saved and goes on elsewhere, as the ranks of a pool run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs import TASKS

import penstock
from penstock import checkpoint
from penstock.checkpoint import folders

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of the steps, and what this process holds after them."""


def train(
    rank: int,
    name: str,
    options: dict[str, Any],
    steps: int,
    folder: Path | None = None,
    save_at: int | None = None,
) -> Trained:
    """Trains until `steps` steps have been taken, from a checkpoint if there is one, and saves after `save_at`."""
    del rank
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, microbatches=4, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        others = {"scheduler": scheduler}
        if folder is not None and save_at is None:
            restored = checkpoint.load(folder, pipe, optimizer, others=others)
            assert restored is not None
            assert restored.extra == {"batches": restored.step}
            assert scheduler.last_epoch == restored.step
        losses = []
        while pipe.step_count < steps:
            losses.append(float(pipe.step(*task.args, target=task.target, **task.kwargs).loss))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if pipe.step_count == save_at:
                assert folder is not None
                checkpoint.save(folder, pipe, optimizer, others=others, extra={"batches": pipe.step_count})
        return losses, {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def save_twice(rank: int, folder: Path, keep: int | None) -> list[str]:
    task = TASKS["mlp"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4) as pipe:
        for _ in range(3):
            pipe.step(*task.args, target=task.target)
            checkpoint.save(folder, pipe, keep=keep)
        checkpoint.save(folder, pipe, keep=keep)  # the same step once more
    return sorted(path.name for path in folder.iterdir())


def refusal(rank: int, folder: Path, name: str, action: str) -> str:
    """What a save or a load says."""
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, microbatches=4) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        try:
            if action == "save":
                checkpoint.save(folder, pipe, optimizer)
            else:
                checkpoint.load(folder, pipe, optimizer if action == "load with optimizer" else None)
        except penstock.PenstockError as error:
            return str(error)
    return "nothing"


def die_in_the_middle(rank: int, folder: Path) -> None:
    """Leaves what a process leaves that is killed while it saves: a folder that was not renamed."""
    task = TASKS["mlp"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4) as pipe:
        pipe.step(*task.args, target=task.target)
        folders.publish = lambda *_: None  # type: ignore[assignment]
        checkpoint.save(folder, pipe)
