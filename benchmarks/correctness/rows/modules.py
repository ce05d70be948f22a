"""Modules whose behaviour a pipeline may change: norms, dropout, skips, in-place updates, recomputation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, SplitPoint
from torch.distributed.pipelining import pipeline as torch_pipeline
from torch.utils.checkpoint import checkpoint

import penstock
from rows.common import CPU, MICROBATCHES, ROWS, WIDTH, Found, apart, batch, in_penstock, in_torch, layers, step


def normed_torch(rank: int) -> Found:
    norm = nn.BatchNorm1d(WIDTH)
    (x, y), modules = batch(), layers(norm)
    step(in_torch(rank, modules), rank, x, y)
    return f"{int(norm.num_batches_tracked)} batches counted" if rank == 0 else None


def normed_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(nn.BatchNorm1d(WIDTH)), x) as pipe:
        pipe.step(x, target=y)
        counts = [int(buffer) for name, buffer in pipe.named_buffers() if name.endswith("num_batches_tracked")]
        return f"{counts[0]} batches counted" if counts else None


def dropped_torch(rank: int) -> Found:
    x, _ = batch()
    model = nn.Sequential(*layers(nn.Dropout(0.5)))
    traced = torch_pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    first = traced.get_stage_module(0)
    try:
        first.eval()
    except Exception as error:
        return f"eval() raises {type(error).__name__}"
    output = first(x)
    share = float(((output[0] if isinstance(output, tuple) else output) == 0).float().mean())
    return f"{share:.0%} of activations are dropped after eval()"


def dropped_penstock(rank: int) -> Found:
    x, y = batch()
    model = nn.Sequential(*layers(nn.Dropout(0.5)))
    plain = copy.deepcopy(model).eval()(x)
    with penstock.pipeline(model, (x,), loss_fn=F.mse_loss, microbatches=1) as pipe:
        result = pipe.evaluate(x, target=y, outputs=True)
        return apart(result.outputs[0], plain) if pipe.has_outputs else None


class Skips(nn.Module):
    """Uses the first layer's output in the second and in the fourth layer, which are in different stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first)


def _skipped_right() -> Tensor | None:
    (x, y), model = batch(), Skips()
    F.mse_loss(model(x), y).backward()
    return model.a.weight.grad


def skipped_torch(rank: int) -> Found:
    (x, y), model = batch(), Skips()
    cuts = dict.fromkeys("bcd", SplitPoint.BEGINNING)
    traced = torch_pipeline(model, (x[: ROWS // MICROBATCHES],), split_spec=cuts)
    stages = [traced.build_stage(index, CPU) for index in (rank, rank + 2)]
    step(ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss), rank, x, y)
    return apart(stages[0].submod.get_parameter("a.weight").grad, _skipped_right()) if rank == 0 else None


def skipped_penstock(rank: int) -> Found:
    x, y = batch()
    options = {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "cuts": ["b", "c", "d"]}
    with penstock.pipeline(Skips(), (x,), loss_fn=F.mse_loss, microbatches=MICROBATCHES, **options) as pipe:
        pipe.step(x, target=y)
        held = dict(pipe.named_parameters())
        return apart(held["a.weight"].grad, _skipped_right()) if "a.weight" in held else None


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def in_place_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[1] = nn.Sequential(Doubles(), modules[1])
    step(in_torch(rank, modules), rank, x, y)
    return None if rank == 0 else "runs"


def in_place_penstock(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[1] = nn.Sequential(Doubles(), modules[1])
    with in_penstock(modules, x) as pipe:
        pipe.step(x, target=y)
    return None if rank == 0 else "runs"


class Recomputed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.last = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.norm, x, use_reentrant=False))


def recomputed_torch(rank: int) -> Found:
    norm = nn.BatchNorm1d(WIDTH)
    (x, y), modules = batch(), [Recomputed(norm), layers()[1]]
    step(in_torch(rank, modules), rank, x, y)
    return f"{int(norm.num_batches_tracked)} batches counted" if rank == 0 else None


def recomputed_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(nn.BatchNorm1d(WIDTH)), x, recompute="always") as pipe:
        pipe.step(x, target=y)
        counts = [int(buffer) for name, buffer in pipe.named_buffers() if name.endswith("num_batches_tracked")]
        return f"{counts[0]} batches counted" if counts else None
