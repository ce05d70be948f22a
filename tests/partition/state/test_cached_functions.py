"""What a recorded forward calls by another way than through a module or torch: cached functions, bound methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import inspect
from scaffolding.models import OneLayer
from scaffolding.proofs import proven

WIDTH = 4


@functools.lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width) / width


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """As libraries do it: the function that keeps results is a variable around another."""
    kept = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return kept(*args)

    return call


@functools.cache
def registry(name: str) -> list[str]:
    return [name]


class Block(OneLayer):
    @keeping
    def scale(self, width: int) -> Tensor:
        return torch.arange(width) + 1.0

    def forward(self, x: Tensor) -> Tensor:
        registry("block")
        return torch.tanh(self.layer(x)) * self.scale(WIDTH) + positions(WIDTH)


def test_tables_that_functions_keep_are_not_left_fake() -> None:
    torch.manual_seed(0)
    positions.cache_clear()
    first = registry("first")
    model, x = nn.Sequential(*[Block(WIDTH) for _ in range(4)]), torch.randn(4, WIDTH)
    inspect(model, (x,), stages=2)
    assert type(positions(WIDTH)) is Tensor
    assert registry("first") is first  # no tensor in it, so that it is left alone
    assert type(model(x)) is Tensor
    positions.cache_clear()
    proven(model, x, torch.randn(4, WIDTH), ranks=4, microbatches=2, exact=True)


@functools.cache
def distances(rows: int) -> Tensor:
    return torch.arange(rows).float() + 1


class ReadsItsTable(nn.Linear):
    """Fake tensors have no values: it fails on them after the function has kept one, and runs once for real."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * distances(WIDTH)[0].item()


def test_a_block_that_reads_a_table_that_a_function_keeps_runs_for_real() -> None:
    distances.cache_clear()
    model = nn.Sequential(*[ReadsItsTable(WIDTH, WIDTH) for _ in range(3)])
    proven(model, torch.randn(4, WIDTH), torch.randn(4, WIDTH), ranks=2, microbatches=2)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 * x.sigmoid()  # not what autograd would find


swish = Swish.apply


class Own(nn.Module):
    """Calls it between the layers, under two names that were bound before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act = Swish.apply

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) + swish(x)
        return x


@pytest.mark.parametrize("in_c", [False, True])
def test_apply_that_was_bound_before_is_one_call(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.15, `apply` is no method of Python's."""
    if in_c:
        monkeypatch.setattr(torch.autograd.Function, "apply", torch._C._FunctionBase.__dict__["apply"])
        monkeypatch.setitem(globals(), "swish", Swish.apply)
    torch.manual_seed(0)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    proven(Own, x, y, ranks=2, microbatches=2, exact=True)
    assert swish == Swish.apply
