"""A model in bfloat16, and its gradients by hand: the sums of all microbatches' terms in another dtype."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS, LENGTH, MICROBATCHES = 23, 16, 16, 5, 4

TIED = "embedding.weight"

Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Its embedding is the head's weight, which the first and the last stage use; one layer is never used."""

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(dtype)
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


@cache
def by_hand(*, replicas: int = 1, steps: int = 1, accumulate: torch.dtype | None = torch.float32) -> Gradients:
    """The gradients of some steps, each microbatch's as plain torch makes it; None: added in the parameter's dtype.

    The terms of the tied weight come from two weights with the same values. What several processes hold is added up
    over these after each step, before it is added to the gradients of earlier steps.
    """
    net, totals = Net(tied=False), dict[str, Tensor]()
    for step in range(steps):
        parts = [dict[str, Tensor]() for _ in range(replicas)]
        for mine, *rows in zip(parts, *(tensor.chunk(replicas) for tensor in batch(step)), strict=True):
            for x, y in zip(*(part.chunk(MICROBATCHES) for part in rows), strict=True):
                loss(net(x.clone()), y.clone()).backward(torch.tensor(1 / MICROBATCHES))
                for name, p in net.named_parameters():
                    if p.grad is not None:
                        shared = replicas > 1 or name in (TIED, "head.weight")
                        term = p.grad.to(torch.promote_types(p.dtype, accumulate or p.dtype))
                        _add(mine if shared else totals, name, term)
                net.zero_grad()
        for mine in parts:
            _add(mine, TIED, mine.pop("head.weight"))
        for name in parts[0]:
            _add(totals, name, sum((mine[name] for mine in parts[1:]), start=parts[0][name]) / replicas)
    return {name: totals.get(name) for name, _ in Net().named_parameters()}


def _add(sums: dict[str, Tensor], name: str, term: Tensor) -> None:
    sums[name] = sums[name] + term if name in sums else term


def assert_sums(mine: Gradients, expected: Gradients, *, reordered: str = "") -> None:
    """Asserts gradients in float32 with the same bits; those of one name may be added in another order."""
    for name, grad in mine.items():
        other = expected[name]
        assert (grad is None) == (other is None), name
        if grad is None or other is None:
            continue
        assert grad.dtype == torch.float32, name
        if name == reordered:
            assert (grad - other).abs().max() <= 1e-6 * other.abs().max(), name
        else:
            assert torch.equal(grad, other), name
