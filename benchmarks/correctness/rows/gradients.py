"""Silently wrong gradients: ties, accumulation, means, masks, and stages without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from rows.common import MICROBATCHES, ROWS, WIDTH, Found, apart, batch, in_penstock, in_torch, layers, step


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def words() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets, and the correct gradient of the tied weight."""
    torch.manual_seed(1)
    ids, target = torch.randint(11, (ROWS,)), torch.randint(11, (ROWS,))
    model = Tied()
    F.cross_entropy(model(ids), target).backward()
    assert model.embed.weight.grad is not None
    return ids, target, model.embed.weight.grad


def tied_torch(rank: int) -> Found:
    ids, target, right = words()
    model = Tied()
    stages: list[nn.Module] = [nn.Sequential(model.embed, model.body), model.head]
    step(in_torch(rank, stages, F.cross_entropy), rank, ids, target)
    return apart(model.embed.weight.grad, right)


def tied_penstock(rank: int) -> Found:
    ids, target, right = words()
    with penstock.pipeline(Tied(), (ids,), loss_fn=F.cross_entropy, microbatches=MICROBATCHES) as pipe:
        pipe.step(ids, target=target)
        return apart(dict(pipe.named_parameters())["embed.weight"].grad, right)


def _factor(twice: Tensor | None, once: Tensor | None) -> str:
    assert twice is not None
    assert once is not None
    return f"{float((twice * once).sum() / once.square().sum()):.2f} times one step's gradient"


def accumulated_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule, weight = in_torch(rank, modules), next(modules[rank].parameters())
    step(schedule, rank, x, y)
    once = weight.grad.clone()
    step(schedule, rank, x, y)
    return _factor(weight.grad, once)


def accumulated_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        weight = next(pipe.parameters())
        pipe.step(x, target=y)
        once = weight.grad.clone()
        pipe.step(x, target=y)
        return _factor(weight.grad, once)


def evaluated_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule, weight = in_torch(rank, modules), next(modules[rank].parameters())
    step(schedule, rank, x, y)
    once = weight.grad.clone()
    schedule.eval(x) if rank == 0 else schedule.eval(target=y)
    return _factor(weight.grad, once)


def evaluated_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        weight = next(pipe.parameters())
        pipe.step(x, target=y)
        once = weight.grad.clone()
        pipe.evaluate(x, target=y)
        return _factor(weight.grad, once)


def _mean() -> list[nn.Module]:
    (x, y), modules = batch(), layers()
    F.mse_loss(nn.Sequential(*modules)(x), y).backward()
    return modules


def mean_torch(rank: int) -> Found:
    (x, y), modules, right = batch(), layers(), _mean()
    step(in_torch(rank, modules), rank, x, y)
    return apart(next(modules[rank].parameters()).grad, next(right[rank].parameters()).grad)


def mean_penstock(rank: int) -> Found:
    (x, y), right = batch(), _mean()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        return apart(next(pipe.parameters()).grad, next(right[rank].parameters()).grad)


def masked() -> tuple[Tensor, Tensor, list[nn.Module]]:
    x, _ = batch()
    target = torch.tensor([1, 2, 3, -100, 4, -100, 5, 0])
    whole = layers()
    F.cross_entropy(nn.Sequential(*whole)(x), target).backward()
    return x, target, whole


def masked_torch(rank: int) -> Found:
    x, target, whole = masked()
    modules = layers()
    step(in_torch(rank, modules, F.cross_entropy), rank, x, target)
    return apart(next(modules[rank].parameters()).grad, next(whole[rank].parameters()).grad)


def masked_penstock(rank: int) -> Found:
    x, target, whole = masked()
    with in_penstock(layers(), x, F.cross_entropy, reduction=lambda t: (t != -100).sum()) as pipe:
        pipe.step(x, target=target)
        return apart(next(pipe.parameters()).grad, next(whole[rank].parameters()).grad)


def frozen_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[0].requires_grad_(False)
    step(in_torch(rank, modules), rank, x, y)
    return None if rank == 0 else "runs"


def frozen_penstock(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[0].requires_grad_(False)
    with in_penstock(modules, x) as pipe:
        pipe.step(x, target=y)
    return None if rank == 0 else "runs"


def bare_torch(rank: int) -> Found:
    modules = [nn.Tanh(), layers()[1]]
    torch.optim.AdamW(modules[rank].parameters()) if rank == 0 else None
    return "runs"


def bare_penstock(rank: int) -> Found:
    x, _ = batch()
    with in_penstock([nn.Tanh(), layers()[1]], x) as pipe:
        torch.optim.AdamW(pipe.parameters())
    return "runs"
