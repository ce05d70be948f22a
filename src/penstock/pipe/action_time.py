"""What the runtime adds to each forward and each backward of a stage, as a pipeline with nothing to do shows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.partition.run.loan import untouched_generators
from penstock.pipe.build import build
from penstock.pipe.options import Options
from penstock.runtime.processes.world import World
from penstock.schedule import generate

STAGES = 4
FEW, MANY = 2, 10
"""Microbatches. A longer step has so many more actions, and nothing else more."""

STEPS = 10


def action_seconds() -> float:
    """The runtime's own time for one action on a CPU, this process driving all ranks.

    It is the least of several: what else runs here only adds to it. Draws nothing from random generators.
    """
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), untouched_generators():
        more = (MANY - FEW) * STAGES
        whole = (_step_seconds(MANY) - _step_seconds(FEW)) / more
        layer, x = _layer(), _zeros(1).requires_grad_()
        bare = _least(lambda: torch.autograd.backward(layer(x), torch.ones_like(x)))
    return max(0.0, (whole - bare) / 2)  # a forward and a backward


def _step_seconds(microbatches: int) -> float:
    layers, x = nn.Sequential(*(_layer() for _ in range(STAGES))), _zeros(microbatches)
    options = Options(loss_fn=nn.functional.mse_loss, balance="layers")
    order = generate("1f1b", STAGES, microbatches)
    with build(layers, ((x,), {}), World(STAGES), order, options) as pipe:
        return _least(lambda: pipe.step(x, target=x))


def _least(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _layer() -> nn.Module:
    return nn.Linear(8, 8, device="cpu", dtype=torch.float32)


def _zeros(rows: int) -> Tensor:
    return torch.zeros(rows, 8, device="cpu", dtype=torch.float32)
