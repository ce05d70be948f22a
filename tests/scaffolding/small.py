"""What several tests of the whole are made of: a tiny network, batches that divide by nothing, a tokens' batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.runtime.execute.stage_runner import StageRunner

torch.set_num_threads(1)  # bits are compared

ROWS, WIDTH = 11, 9

ONE_STAGE = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
"""With one stage a rank, for any number of ranks and microbatches. `test_verify_matrix` runs every schedule."""


def mlp(layers: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def batch(rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def tokens(vocabulary: int = 19) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def training_runners(pipe: Pipeline) -> list[StageRunner]:
    """What runs each stage of this process in a training step."""
    job = next(job for job in pipe.session.steps.bound_schedules if job.training)
    return [runner for program in job.programs for runner in program.runners.values()]
