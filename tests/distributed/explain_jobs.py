"""A model whose blocks take as long as they are told to, forward and backward: they sleep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.pipe.result import StepResult
from scaffolding.sleeping import SleepingBlock

MICROBATCHES = 8


def traced(
    rank: int, seconds: Sequence[float], cuts: Sequence[str], slow_rank: int = -1, extra: float = 0.0
) -> list[dict[str, Any]]:
    """The timelines of five steps of a model with such blocks, after one for warming up. Their median is quiet."""
    torch.manual_seed(0)
    here = extra if dist.get_rank() == slow_rank else 0.0
    model = nn.Sequential(*(SleepingBlock(one, here) for one in seconds))
    x = torch.randn(MICROBATCHES, 4)
    leaves = [str(place) for place in range(len(seconds))]
    found: list[StepResult] = []
    with penstock.pipeline(
        model, (x,), loss=nn.functional.mse_loss, microbatches=MICROBATCHES, cuts=list(cuts), leaf_modules=leaves
    ) as pipe:
        for _ in range(6):
            found.append(pipe.step(x, target=x, timeline=True))
        return [one.timeline.to_dict() for one in found[1:] if one.timeline is not None]


def traced_by_torch(rank: int, schedule: str, folder: str) -> None:
    """Steps of torch's own pipelines under its profiler, whose files of each rank go into the folder."""
    from torch.distributed import pipelining
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    torch.manual_seed(0)
    count = 4 if schedule == "ScheduleInterleaved1F1B" else 2
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(count)]
    stages = [
        pipelining.PipelineStage(layers[stage], stage, count, torch.device("cpu")) for stage in range(rank, count, 2)
    ]
    x, y = torch.randn(64, 256), torch.randn(64, 256)
    made = getattr(pipelining, schedule)(stages if count > 2 else stages[0], 4, nn.functional.mse_loss)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        on_trace_ready=tensorboard_trace_handler(folder, worker_name=f"rank{rank}"),
    ) as profiler:
        for _ in range(4):
            made.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
            profiler.step()
