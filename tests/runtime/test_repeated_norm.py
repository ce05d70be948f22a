"""Batch norm inside of `torch.utils.checkpoint` leaves the running statistics that plain torch leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.runtime.repeated_norm import RepeatedNorms

WIDTH, MICROBATCHES = 6, 4


class Block(nn.Module):
    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.inside, self.reentrant = inside, reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).relu()

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=self.reentrant) if self.inside else self.body(x))


class Dense(nn.Module):
    """Checkpoints in its blocks, or around them; one block has none."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inside, reentrant) for _ in range(4))
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            plain = self.inside or number == 2
            x = block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def made(inside: bool, reentrant: bool) -> tuple[Dense, Tensor, Tensor]:
    torch.manual_seed(0)
    return Dense(inside, reentrant), torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def by_torch(inside: bool, reentrant: bool) -> Dense:
    model, x, y = made(inside, reentrant)
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        F.mse_loss(model(a.clone()), b).backward(torch.tensor(1 / MICROBATCHES))
    return model


def piped(inside: bool, reentrant: bool, **options: Any) -> Dense:
    model, x, y = made(inside, reentrant)
    with penstock.pipeline(model, (x,), loss=F.mse_loss, microbatches=MICROBATCHES, **options) as pipe:
        pipe.step(x, target=y)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1},
        {"ranks": 2, "schedule": "gpipe"},
        {"ranks": 4},
        {"ranks": 2, "schedule": "zb-h1"},
        {"ranks": 2, "recompute": "always"},
        {"ranks": 2, "recompute": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_running_statistics_are_those_of_plain_torch(inside: bool, reentrant: bool, options: dict[str, Any]) -> None:
    expected, model = by_torch(inside, reentrant), piped(inside, reentrant, **options)
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_without_the_rule_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(RepeatedNorms, "repeating", lambda self: nullcontext())
    monkeypatch.setattr(RepeatedNorms, "still", lambda self: nullcontext())
    expected, model = by_torch(True, False), piped(True, False, ranks=2, schedule="gpipe")
    assert not all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_checkpoint_that_nothing_trains_before_is_not_run_again() -> None:
    """As in plain torch, what is in a reentrant checkpoint takes no gradient unless its input does."""
    model, x, y = made(True, True)
    model.stem.requires_grad_(False)
    model.blocks[0].inside = True
    head = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    report = penstock.verify(head, (x,), y, F.mse_loss, ranks=2, microbatches=MICROBATCHES, exact=True)
    assert report.ok, report.summary()
