"""What ranks run with parameter groups, and the same on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import checkpoint
from scaffolding.small import batch

ROWS = 8


def model() -> nn.Module:
    """Its last layers hold no parameters: with four stages one rank has none."""
    torch.manual_seed(0)
    layers = [nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh()]
    return nn.Sequential(*layers)


CUTS = {2: ["2"], 4: ["2", "4", "5"]}


def options_of(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
    """No decay for vectors; layer 0 learns slowly; the bias of layer 2 is not trained."""
    if name == "2.bias":
        return None
    return {"weight_decay": 0.0 if parameter.dim() < 2 else 0.1, "lr": 0.001 if name.startswith("0.") else 0.01}


class Seen(NamedTuple):
    weights: dict[str, Tensor]
    sizes: list[int]
    """Of each group, here."""
    options: list[tuple[float, float]]


def train(rank: int, ranks: int | None, folder: str | None = None, steps: int = 3) -> Seen:
    """Some steps with a schedule of rates, from the latest checkpoint on if there is one."""
    x, y = batch(ROWS)
    cuts = CUTS.get(ranks or 0) or CUTS.get(torch.distributed.get_world_size() if ranks is None else 0)
    with penstock.pipeline(model(), (x,), ranks=ranks, microbatches=4, loss=F.mse_loss, cuts=cuts) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameter_groups(options_of))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if folder is not None:
            checkpoint.load(folder, pipe, optimizer, stateful={"scheduler": scheduler})
        while pipe.step_count < steps:
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
            scheduler.step()
        if folder is not None:
            checkpoint.save(folder, pipe, optimizer, stateful={"scheduler": scheduler})
        return Seen(
            {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()},
            [len(group["params"]) for group in optimizer.param_groups],
            [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups],
        )
