"""What a forward keeps for its own backward elsewhere than in attributes, lists and dicts."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import verify
from scaffolding.representatives import representatives

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)
ORDERS = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])


class Slotted:
    __slots__ = ("scale",)


def kept() -> None:
    """A function that has an attribute."""


def variable() -> tuple[Any, Any]:
    held = None

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return put, lambda: held


SLOTTED, LOCAL, CONTEXT = Slotted(), threading.local(), ContextVar[Any]("scale")
PUT, GET = variable()


class Recalls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        block.put(1 + x.detach().abs().mean())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.block.get(), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Recalls.apply(self.linear(x), self)

    def put(self, scale: Any) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        raise NotImplementedError


class InSlots(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slotted()

    def put(self, scale: Any) -> None:
        self.slots.scale = scale

    def get(self) -> Any:
        return self.slots.scale


class InGlobalSlots(Block):
    def put(self, scale: Any) -> None:
        SLOTTED.scale = scale

    def get(self) -> Any:
        return SLOTTED.scale


class InArray(Block):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(1, dtype=np.float32)

    def put(self, scale: Any) -> None:
        self.array[0] = float(scale)

    def get(self) -> Any:
        return float(self.array[0])


class InSet(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: set[Any] = set()

    def put(self, scale: Any) -> None:
        self.kept.clear()
        self.kept.add(scale)

    def get(self) -> Any:
        return next(iter(self.kept))


class InVariable(Block):
    def put(self, scale: Any) -> None:
        PUT(scale)

    def get(self) -> Any:
        return GET()


class InThread(Block):
    def put(self, scale: Any) -> None:
        LOCAL.scale = scale

    def get(self) -> Any:
        return LOCAL.scale


class InContext(Block):
    def put(self, scale: Any) -> None:
        CONTEXT.set(scale)

    def get(self) -> Any:
        return CONTEXT.get()


class InFunction(Block):
    def put(self, scale: Any) -> None:
        kept.scale = scale  # type: ignore[attr-defined]

    def get(self) -> Any:
        return kept.scale  # type: ignore[attr-defined]


class InDeepList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = [[[[[[None]]]]]]

    def put(self, scale: Any) -> None:
        self.kept[0][0][0][0][0][0] = scale

    def get(self) -> Any:
        return self.kept[0][0][0][0][0][0]


class OnParameter(Block):
    def put(self, scale: Any) -> None:
        self.linear.weight.scale = scale  # type: ignore[assignment]

    def get(self) -> Any:
        return self.linear.weight.scale


PUT_BACK = [
    InSlots,
    InGlobalSlots,
    InArray,
    InSet,
    InVariable,
    InThread,
    InContext,
    InFunction,
    InDeepList,
    OnParameter,
]
OF_ALL = (InGlobalSlots, InVariable, InThread, InContext, InFunction)
"""Of what is kept in one place for all, one block may use it."""


def model_of(kind: type[Block]) -> nn.Module:
    others = [nn.Linear(6, 6), nn.Linear(6, 6)] if kind in OF_ALL else [nn.Linear(6, 6), kind()]
    return nn.Sequential(kind(), *others)


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"), representatives(2, PUT_BACK, ["gpipe", "1f1b"], ["never", "always"])
)
def test_each_backward_finds_what_its_own_forward_has_kept(kind: type[Block], schedule: str, recompute: Any) -> None:
    verify(
        model_of(kind),
        (X,),
        target=TARGET,
        loss_fn=F.mse_loss,
        ranks=2,
        schedule=schedule,
        microbatches=4,
        recompute=recompute,
    ).check()
