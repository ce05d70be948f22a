"""What the rows share: small models, batches, and a pipeline of each library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock

WIDTH, ROWS, MICROBATCHES = 6, 8, 4


CPU = torch.device("cpu")


Found = str | None


class Row(NamedTuple):
    number: int
    trap: str
    right: str
    torch: Callable[[int], Found]
    penstock: Callable[[int], Found]


def layers(*extra: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), *extra), nn.Linear(WIDTH, WIDTH)]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def in_torch(rank: int, modules: list[nn.Module], loss: Any = F.mse_loss, m: int = MICROBATCHES) -> Any:
    return Schedule1F1B(PipelineStage(modules[rank], rank, 2, CPU), m, loss_fn=loss)


def step(schedule: Any, rank: int, x: Any, y: Any) -> Any:
    return schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])


def in_penstock(modules: list[nn.Module], x: Any, loss: Any = F.mse_loss, m: int = MICROBATCHES, **options: Any) -> Any:
    return penstock.pipeline(modules, (x,), loss_fn=loss, microbatches=m, **options)


def apart(mine: Tensor | None, right: Tensor | None) -> str:
    """The largest difference, relative to the largest entry."""
    if mine is None or right is None:
        return "right" if mine is right else "no gradient"
    share = float((mine - right).abs().max() / right.abs().max())
    return "right" if share <= 1e-5 else f"wrong: off by {share:.2f} of the largest entry"
