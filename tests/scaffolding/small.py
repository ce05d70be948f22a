"""Pieces for end-to-end tests: a tiny network, batches that do not divide evenly, a batch of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.runtime.execute.stage import BoundStage

torch.set_num_threads(1)  # tests compare bits

ROWS, WIDTH = 11, 9

ONE_STAGE = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
"""Schedules with one stage per rank, for any number of ranks and microbatches. `test_zoo_matrix` runs all schedules.
"""


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


def training_stages(pipe: Pipeline) -> list[BoundStage]:
    """This process's stages in a training step."""
    job = next(job for job in pipe.session.bound_schedules if job.training)
    return [*job.stages]


class Retrieval(nn.Module):
    """Scores of two passages for each query; a passage may get a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.passage, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, queries: Tensor, passages: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self.passage(passages).tanh()
        found = found if bias is None else found + bias
        scores = (self.head(self.query(queries).tanh())[:, None] * found.unflatten(0, (-1, 2))).sum(2)
        return scores, found


def retrieval_error(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The target has a row for each passage."""
    scores, found = output
    return scores.square().mean() + (found - target).square().mean()
