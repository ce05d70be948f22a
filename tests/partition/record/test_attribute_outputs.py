"""Mixtures of experts that route by values, and so run as a whole, leave their auxiliary loss in an attribute; and
numbers, which no loss reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import pipeline, verify
from scaffolding.everything import everything_goes

WIDTH, EXPERTS, ROWS = 8, 4, 8


class Mixture(nn.Module):
    """Each token goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.l_aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        weight, chosen = chances.max(-1)
        self.l_aux = (chances.mean(0) * F.one_hot(chosen, EXPERTS).float().mean(0)).sum()
        self.largest, self.load = float(weight.max()), [int(chosen.eq(k).sum()) for k in range(EXPERTS)]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))


class Experts(nn.Module):
    """Its loss function reads what the blocks leave; or, `own`, its forward does."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.own = own

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return (x, auxiliary(self)) if self.own else x


def auxiliary(model: Experts) -> Tensor:
    return sum(block.mixture.l_aux for block in model.blocks)  # type: ignore[return-value]


def made(**options: Any) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Experts(**options)
    if model.own:
        return model, lambda output, target: (output[0] - target).square().mean() + output[1]
    return model, lambda output, target: (output - target).square().mean() + auxiliary(model)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


@everything_goes
@pytest.mark.parametrize(
    ("own", "options"),
    [
        (False, {"ranks": 4, "schedule": "gpipe"}),
        (True, {"ranks": 2, "schedule": "interleaved-1f1b"}),
        (False, {"ranks": 2, "schedule": "dualpipe"}),
        (False, {"ranks": 2, "schedule": "gpipe", "recompute": 1}),
        (True, {"ranks": 2, "schedule": "zb-h1", "offload": True}),
    ],
)
def test_an_auxiliary_loss_of_each_mixture_counts(own: bool, options: dict[str, Any]) -> None:
    x, y = batch()
    report = verify(lambda: made(own=own), (x,), target=y, microbatches=4, **options).raise_if_failed()
    weight, whole = "blocks.0.mixture.gate.weight", made(own=own)
    for args, target in zip(x.split(2), y.split(2), strict=True):
        whole[1](whole[0](args), target).backward()
    largest = whole[0].get_parameter(weight).grad.abs().max() / 4  # type: ignore[union-attr]
    row = next(row for row in report.rows if row.name == weight)
    assert row.max_reference == pytest.approx(float(largest)), "as in plain torch, with the auxiliary loss"


def test_an_evaluation_finds_it_too() -> None:
    x, y = batch()
    model, loss = made()
    with pipeline(model, (x,), ranks=2, microbatches=4, loss=loss) as pipe:
        pipe.step(x, target=y)
        found = float(pipe.evaluate(x, target=y).loss)
    plain, loss = made()
    with torch.no_grad():
        losses = [float(loss(plain(args), target)) for args, target in zip(x.split(2), y.split(2), strict=True)]
    assert found == pytest.approx(sum(losses) / 4)
