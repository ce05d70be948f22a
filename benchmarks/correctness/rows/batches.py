"""Unusual batches: smaller ones, uneven ones, few microbatches, nested structures."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rows.common import Found, apart, batch, in_penstock, in_torch, layers, step


def smaller_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule = in_torch(rank, modules)
    step(schedule, rank, x, y)
    output = step(schedule, rank, x[:4], y[:4])
    return None if rank == 0 else f"outputs of {len(output)} rows for 4"


def smaller_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        result = pipe.step(x[:4], target=y[:4], outputs=True)
        return f"outputs of {sum(map(len, result.outputs))} rows for 4" if pipe.has_outputs else None


def few_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    step(in_torch(rank, modules, m=1), rank, x, y)
    return "runs"


def few_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x, m=1) as pipe:
        pipe.step(x, target=y)
    return "runs"


def uneven_torch(rank: int) -> Found:
    (x, y), modules = batch(7), layers()
    whole = layers()
    F.mse_loss(nn.Sequential(*whole)(x), y).backward()
    step(in_torch(rank, modules), rank, x, y)
    return apart(next(modules[rank].parameters()).grad, next(whole[rank].parameters()).grad)


def uneven_penstock(rank: int) -> Found:
    (x, y), whole = batch(7), layers()
    F.mse_loss(nn.Sequential(*whole)(x), y).backward()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        return apart(next(pipe.parameters()).grad, next(whole[rank].parameters()).grad)


def dict_loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, target["y"])


def structured_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    step(in_torch(rank, modules, dict_loss), rank, x, {"y": y})
    return None if rank == 0 else "runs"


def structured_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x, dict_loss) as pipe:
        pipe.step(x, target={"y": y})
    return None if rank == 0 else "runs"
