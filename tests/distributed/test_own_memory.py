"""Modules that write each result into memory of their own: what waits, is sent or is kept has other memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from scaffolding.by_hand import step_by_hand
from scaffolding.compared import differences
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.small import WIDTH

pytestmark = pytest.mark.distributed


ROWS, STEPS = 16, 2


class Block(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None

    def kept(self, h: Tensor, name: str = "memory") -> Tensor:
        """Memory of this shape and name, without a graph."""
        memory = getattr(self, name, None)
        memory = torch.zeros_like(h) if memory is None or memory.shape != h.shape else memory.detach()
        setattr(self, name, memory)
        return memory


class Views(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        return self.kept(h).copy_(h).view(-1, 3, 3).flatten(1)


class Out(Block):
    """`out=` is for code without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.line(x)
        return torch.addmm(self.line.bias, x, self.line.weight.t(), out=self.kept(x))


class Scratch(torch.autograd.Function):
    """Puts its result and its gradient into memory of the module's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.copy_(x * 3).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradient.copy_(gradient * 3), None, None


class Replay(Scratch):
    """As the backward of a graphed callable: what it writes raises no version, and its result is a view of memory."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.gradient.data.copy_(gradient * 3)
        return ctx.gradient.detach(), None, None


class Graphed(Block):
    """After its layer, so that the layer's weight gradient is of that memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        return Replay.apply(h, self.kept(h.detach()), self.kept(h.detach(), "gradient"))  # type: ignore[no-untyped-call]


class OwnGradient(Block):
    """On the second stage, so that its gradient is a message."""

    def forward(self, x: Tensor) -> Tensor:
        return self.line(Scratch.apply(x, self.kept(x.detach()), self.kept(x.detach(), "gradient")))  # type: ignore[no-untyped-call]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind: Callable[[], nn.Module] = globals()[name]
    if name == "OwnGradient":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(kind(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), kind())


def same_as_by_hand(rank: int, name: str, options: dict[str, Any]) -> list[str]:
    """What differs from plain torch after each of some steps and predictions, as far as this rank knows."""
    model = model_of(name)
    reference = copy.deepcopy(model)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = []
    with penstock.pipeline(model, (x,), loss=squared_error, ranks=2, **{"cuts": ["1"], **options}) as pipe:
        for step in range(STEPS):
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            result = pipe.train().step(x, target=y, outputs=True)
            expected = step_by_hand(reference, (x,), y, squared_error, options["microbatches"])
            found += [f"step {step}: {what}" for what in differences(pipe, reference, expected.total, result)]
            if pipe.has_outputs and not all(map(torch.equal, result.outputs, expected.outputs)):
                found.append(f"step {step}: outputs")
            with torch.no_grad():
                plain = torch.cat([reference(piece.clone()).clone() for piece in x.chunk(options["microbatches"])])
            predicted = pipe.predict(x)
            if pipe.has_outputs and not torch.equal(predicted, plain):
                found.append(f"step {step}: {(predicted != plain).any(1).sum()} predictions")
    return found


KINDS = ["Views", "Out", "OwnGradient", "Graphed"]


@pytest.mark.parametrize(("kind", "transport"), [*zip(KINDS, ["auto", "distributed"] * 2, strict=True)])
def test_a_message_is_not_overwritten_before_it_has_left(ranks2: Ranks, kind: str, transport: str) -> None:
    options = {"microbatches": 8, "transport": transport}
    assert ranks2.run(same_as_by_hand, kind, options) == [[]] * 2


@pytest.mark.parametrize("kind", ["Views", "Graphed"])
def test_nor_is_what_waits_for_w(kind: str) -> None:
    """`OwnGradient` raises: what its next forward overwrites is needed for a gradient."""
    assert same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-h1"}) == []
    chunks = {"stages_per_rank": 2, "cuts": None}
    assert same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-v", **chunks}) == []
