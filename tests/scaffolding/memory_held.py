"""The bytes that a rank's step really holds, as torch's CPU allocator counts them, beside what `inspect` predicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import penstock
from penstock.costs import tied_bytes_overcount
from penstock.plan import Cluster, ParallelConfig, Plan, Sizes
from penstock.plan.layout import assign_pools
from penstock.plan.predict import cut_model, predict, schedule_for_config

WIDTH, ROWS, MICROBATCHES, BLOCKS, VOCABULARY = 64, 256, 8, 8, 2000
STEPS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Words(nn.Module):
    """Predicts words of a large vocabulary: logits are larger than all that the blocks keep.

    Args:
        tied: whether the output layer's weight is the embedding.
    """

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(words)))
        return logits


def convolutions() -> nn.Module:
    """Its results are both what a ReLU keeps and what the next convolution keeps; kernels take buffers of their own."""
    widths = [3, *[16] * 6]
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(widths)
        )
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return x + y


def case(dtype: torch.dtype, words: str = "") -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its batch and target. `words`: "tied" or "untied": of words, for `cross_entropy`; or the kind of model:
    "convolutions" or "lstm".
    """
    torch.manual_seed(0)
    if words == "convolutions":
        return (
            convolutions().to(dtype),
            torch.randn(64, 3, 32, 32, dtype=dtype),
            torch.randn(64, 16, 32, 32, dtype=dtype),
        )
    if words == "lstm":
        x, y = (torch.randn(128, 32, WIDTH, dtype=dtype) for _ in range(2))
        return nn.Sequential(*(Recurrent() for _ in range(6))).to(dtype), x, y
    if words:
        x, y = (torch.randint(VOCABULARY, (ROWS * MICROBATCHES,)) for _ in range(2))
        return Words(tied=words == "tied").to(dtype), x, y
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(dtype)
    x, y = (torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=dtype) for _ in range(2))
    return model, x, y


def loss_of(words: str) -> Any:
    return F.cross_entropy if words in ("tied", "untied") else F.mse_loss


def held(rank: int, dtype: torch.dtype, options: dict[str, Any], words: str = "") -> int:
    """The most bytes that tensors of this rank take in a step after the first: of its stages, and what it makes.

    The median of several steps: whether a message has left before the next action runs, and so what it holds, is a
    matter of luck.
    """
    torch.set_num_threads(1)
    model, x, y = case(dtype, words)
    with penstock.pipeline(model, (x,), loss_fn=loss_of(words), microbatches=MICROBATCHES, **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        forget(pipe)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for _ in range(STEPS):
                with record_function("one more step"):
                    pipe.step(x, target=y)
                    forget(pipe)
        own = sum(parameter.nbytes for parameter in pipe.parameters())
    now, peaks = 0, []
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "one more step":
            peaks.append(now)
        elif event.name() == "[memory]":
            now += event.nbytes()
            peaks[-1] = max(peaks[-1], now)
    return own + int(median(peaks))


def forget(pipe: penstock.Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def predicted(dtype: torch.dtype, ranks: int, options: dict[str, Any], words: str = "") -> list[int]:
    """Each rank's peak, as `inspect` predicts it, without the optimizer."""
    model, x, y = case(dtype, words)
    stages = ranks * options.get("stages_per_rank", 1)
    given = {"microbatches": MICROBATCHES, "loss_fn": loss_of(words), "target": y, "stages": stages, "balance": "flops"}
    return [each.peak - each.optimizer for each in penstock.inspect(model, (x,), **given | options).memory]


def planned(dtype: torch.dtype, ranks: int, schedule: str, chunks: int, words: str = "") -> tuple[Plan, list[float]]:
    """A plan for as many microbatches, and what each rank needs by it, without the optimizer."""
    model, x, y = case(dtype, words)
    profile = penstock.profile(model, (x,), microbatches=MICROBATCHES, budget_seconds=0.0, target=y)
    alike = {"forward_seconds": 1.0, "input_gradient_seconds": 1.0, "weight_gradient_seconds": 1.0}
    sizes = Sizes.of([replace(profile, units=tuple(replace(unit, **alike) for unit in profile.units))])  # the same cuts
    rows = x.shape[0] // MICROBATCHES
    choice, cluster = ParallelConfig(1, ranks, chunks, schedule, MICROBATCHES, rows), Cluster(ranks)
    units, order = sizes.at(rows), schedule_for_config(choice)
    where = cut_model(units, order.placement, cluster, assign_pools(cluster, 1, ranks)[0])
    plan = predict(choice, where)
    bounds = [*where.starts, len(units)]
    needed = []
    for rank, most in enumerate(plan.memory_bytes):
        own = [unit for s in order.placement.stages_on(rank) for unit in units[bounds[s] : bounds[s + 1]]]
        needed.append(most - sum(unit.optimizer_bytes for unit in own) + tied_bytes_overcount(own)[2])
    return plan, needed
