"""A model in bfloat16 whose gradients accumulate in float32: in a pipeline, and added up by hand on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mesh_jobs import mesh_of, part
from torch import Tensor, nn

import penstock

VOCABULARY, WIDTH, ROWS, LENGTH, MICROBATCHES = 23, 16, 16, 5, 4

Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Its embedding is the head's weight, which the first and the last stage use; one layer is never used."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.bfloat16()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))  # in float32
        with torch.no_grad():
            self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        x = x * self.scale.to(x.dtype)
        return self.head(x).float()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def by_hand(replicas: int = 1, steps: int = 1, dtype: torch.dtype | None = torch.float32) -> Gradients:
    """The sum of all microbatches' gradients, each as plain torch makes it in bfloat16; None: in the parameter's dtype.

    The terms of the tied weight come from two weights with the same values.
    """
    net = Net(tied=False)
    totals = [[dict[str, Tensor]() for _ in range(replicas)] for _ in range(steps)]
    for step in range(steps):
        for replica, rows in enumerate(zip(*(t.chunk(replicas) for t in batch(step)), strict=True)):
            for x, y in zip(*(t.chunk(MICROBATCHES) for t in rows), strict=True):
                value = loss(net(x.clone()), y.clone())
                value.backward(torch.tensor(1 / MICROBATCHES))
                sums = totals[step][replica]
                for name, parameter in net.named_parameters():
                    if parameter.grad is not None:
                        term = parameter.grad.to(torch.promote_types(parameter.dtype, dtype or parameter.dtype))
                        sums[name] = sums[name] + term if name in sums else term
                net.zero_grad()
    gradients: Gradients = {}
    for name in totals[0][0]:
        every = [sum_of([one[name] for one in step]) / replicas for step in totals]
        gradients[name] = sum_of(every)
    tied = [[one["embedding.weight"] + one["head.weight"] for one in step] for step in totals]
    gradients["embedding.weight"] = sum_of([sum_of(step) / replicas for step in tied])
    del gradients["head.weight"]
    return {name: gradients.get(name) for name, _ in net.named_parameters() if name != "head.weight"}


def sum_of(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def in_a_pipeline(rank: int, options: dict[str, Any], steps: int = 1, replicas: int = 1) -> Gradients:
    """The gradients that this process holds after some steps without an optimizer."""
    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "gradient_dtype": torch.float32} | options
    replica = 0
    if replicas > 1:
        options["mesh"] = mesh_of((replicas, torch.distributed.get_world_size() // replicas), ("dp", "pp"))
        replica = options["mesh"].get_local_rank("dp")
    with penstock.pipeline(Net(), part(batch()[:1], replica, replicas), **options) as pipe:
        for step in range(steps):
            x, y = part(batch(step), replica, replicas)
            pipe.step(x, target=y)
        return {name: parameter.grad for name, parameter in pipe.session.all_parameters() if not parameter.is_meta}
