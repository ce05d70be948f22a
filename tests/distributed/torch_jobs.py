"""What ranks do to run a schedule's CSV with torch's own runtime, and the same work on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gradients = dict[str, Tensor]


def task(stages: int, microbatches: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """A layer a stage, inputs and targets. Microbatches have the same number of rows, all different."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(stages)]
    return list(layers), torch.randn(2 * microbatches, 5), torch.randn(2 * microbatches, 5)


def gradients(layers: list[nn.Module], only: list[int]) -> Gradients:
    """By stage and name. A parameter without a gradient is left out, which the comparison of the names finds."""
    return {
        f"{stage}.{name}": parameter.grad
        for stage in only
        for name, parameter in layers[stage].named_parameters()
        if parameter.grad is not None
    }


def on_one_device(stages: int, microbatches: int) -> tuple[Tensor, Gradients]:
    """The output and the gradients of the mean loss of the whole batch."""
    layers, x, y = task(stages, microbatches)
    output = nn.Sequential(*layers)(x)
    F.mse_loss(output, y).backward()
    return output.detach(), gradients(layers, list(range(stages)))


def in_torch(rank: int, text: str, format: Any, rank_of: tuple[int, ...], microbatches: int, steps: int = 1) -> Any:
    """The output, on the last stage's rank, and the gradients of the rank's stages."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    layers, x, y = task(len(rank_of), microbatches)
    mine = [stage for stage, owner in enumerate(rank_of) if owner == rank]
    device = torch.device("cpu")
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(layers[stage], stage, len(rank_of), device) for stage in mine], microbatches, F.mse_loss
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(text, newline="")
        runtime._load_csv(str(path), format)
    for _ in range(steps):
        for layer in layers:
            layer.zero_grad()
        output = runtime.step(*([x] if 0 in mine else []), target=y if len(rank_of) - 1 in mine else None)
    return None if output is None else output.detach(), gradients(layers, mine)
