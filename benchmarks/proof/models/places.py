"""State of a forward in globals, classes, closures, slots, context variables: where no attribute of a module shows it.

`Keeps` reads in one microbatch what the one before it has put there; all blocks of a model share the place.
"""

from __future__ import annotations

import functools
import itertools
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from models.registry import WIDTH, Block, Layered, blocks, mean, model

KIND = "globals, classes, closures"


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale: Any = None


class Plain:
    scale: Any = None


def function() -> None:
    """Has an attribute."""


def variable() -> tuple[Any, Any]:
    held = None

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return put, lambda: held


def default(held: list[Any] = []) -> list[Any]:  # noqa: B006
    return held


@functools.cache
def remembered() -> dict[str, Any]:
    return {}


SLOTTED, LOCAL, CONTEXT, NAMED = Slotted(), threading.local(), ContextVar[Any]("scale", default=None), SimpleNamespace()
PUT, GET = variable()
LISTED: list[Any] = []
MAPPED: dict[str, Any] = {}
ARRAY = np.ones(1)
TENSOR = torch.ones(WIDTH)
COUNT = 0
NUMBERS = itertools.count(1)
FACTOR: Any = None


class Keeps(nn.Module):
    """Multiplies by what was put there last, by any block, and puts its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, last = torch.tanh(self.linear(x)), self.get()
        self.put(1 + mean(y).abs())
        return y if last is None else y * last

    def put(self, scale: Any) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        raise NotImplementedError


@blocks(KIND)
class InGlobalSlots(Keeps):
    def put(self, scale: Any) -> None:
        SLOTTED.scale = scale

    def get(self) -> Any:
        return SLOTTED.scale


@blocks(KIND)
class InSlotsOfAClass(Keeps):
    held: ClassVar[Slotted] = Slotted()

    def put(self, scale: Any) -> None:
        self.held.scale = scale

    def get(self) -> Any:
        return self.held.scale


@blocks(KIND)
class InGlobal(Keeps):
    def put(self, scale: Any) -> None:
        global FACTOR  # noqa: PLW0603
        FACTOR = scale

    def get(self) -> Any:
        return FACTOR


@blocks(KIND)
class InGlobalList(Keeps):
    def put(self, scale: Any) -> None:
        LISTED.append(scale)

    def get(self) -> Any:
        return LISTED[-1] if LISTED else None


@blocks(KIND)
class InGlobalDict(Keeps):
    def put(self, scale: Any) -> None:
        MAPPED["scale"] = scale

    def get(self) -> Any:
        return MAPPED.get("scale")


@blocks(KIND)
class InGlobalArray(Keeps):
    def put(self, scale: Any) -> None:
        ARRAY[0] = float(scale.mean())

    def get(self) -> Any:
        return float(ARRAY[0])


@blocks(KIND)
class InGlobalTensor(Keeps):
    def put(self, scale: Any) -> None:
        TENSOR.copy_(scale)

    def get(self) -> Any:
        return TENSOR.clone()


@blocks(KIND)
class InGlobalNamespace(Keeps):
    def put(self, scale: Any) -> None:
        NAMED.scale = scale

    def get(self) -> Any:
        return getattr(NAMED, "scale", None)


@blocks(KIND)
class InOwnClass(Keeps):
    held: Any = None

    def put(self, scale: Any) -> None:
        InOwnClass.held = scale

    def get(self) -> Any:
        return self.held


@blocks(KIND)
class InAnotherClass(Keeps):
    def put(self, scale: Any) -> None:
        Plain.scale = scale

    def get(self) -> Any:
        return Plain.scale


@blocks(KIND)
class InAListOfItsClass(Keeps):
    held: ClassVar[list[Any]] = []

    def put(self, scale: Any) -> None:
        self.held.append(scale)

    def get(self) -> Any:
        return self.held[-1] if self.held else None


@blocks(KIND)
class InVariableOfAClosure(Keeps):
    def put(self, scale: Any) -> None:
        PUT(scale)

    def get(self) -> Any:
        return GET()


@blocks(KIND)
class InThread(Keeps):
    def put(self, scale: Any) -> None:
        LOCAL.scale = scale

    def get(self) -> Any:
        return getattr(LOCAL, "scale", None)


@blocks(KIND)
class InContext(Keeps):
    def put(self, scale: Any) -> None:
        CONTEXT.set(scale)

    def get(self) -> Any:
        return CONTEXT.get()


@blocks(KIND)
class OnFunction(Keeps):
    def put(self, scale: Any) -> None:
        function.scale = scale  # type: ignore[attr-defined]

    def get(self) -> Any:
        return getattr(function, "scale", None)


@blocks(KIND)
class InDefault(Keeps):
    def put(self, scale: Any) -> None:
        default()[:] = [scale]

    def get(self) -> Any:
        return default()[0] if default() else None


@blocks(KIND)
class InCachedFunction(Keeps):
    def put(self, scale: Any) -> None:
        remembered()["scale"] = scale

    def get(self) -> Any:
        return remembered().get("scale")


@blocks(KIND)
class OnTheModuleOfTorch(Keeps):
    """An attribute of a module that was imported."""

    def put(self, scale: Any) -> None:
        torch.nn.functional.scale_of_test = scale  # type: ignore[attr-defined]

    def get(self) -> Any:
        return getattr(torch.nn.functional, "scale_of_test", None)


@blocks(KIND)
class Iterates(Block):
    """Advances a global iterator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * (next(NUMBERS) % 5))


@blocks(KIND)
class CountsInGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return super().forward(x) * (1 + 0.1 * (COUNT % 5))


@blocks(KIND)
class CountsInItsClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInItsClass.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 5))


@blocks(KIND)
class CountsInAnother(Block):
    def forward(self, x: Tensor) -> Tensor:
        Total.calls += 1
        return super().forward(x) * (1 + 0.1 * (Total.calls % 5))


class Total:
    """A class that is used as a global variable."""

    calls = 0
    sizes: ClassVar[list[int]] = []


@blocks(KIND)
class ListsInAnother(Block):
    def forward(self, x: Tensor) -> Tensor:
        Total.sizes.append(len(x))
        return super().forward(x) * (1 + 0.1 * (len(Total.sizes) % 5))


@blocks(KIND)
class OnlyCountsInItsClass(Block):
    """Nothing depends on it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Counted.calls += 1
        return x * (1 + 0.1 * (Counted.calls % 5))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


@blocks(KIND)
class CountsInAFunctionOfAutograd(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Counted.apply(super().forward(x))


@model(KIND)
class SetsAGlobalForItsBlocks(Layered):
    """Its own forward sets a factor that the next layers' hook reads."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda _m, _a, out: out * MAPPED.get("factor", 1.0))

    def forward(self, x: Tensor) -> Any:
        MAPPED["factor"] = 0.5
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            MAPPED["factor"] = 1.0 + number
        return x


@model(KIND)
class TellsByGlobal(Layered):
    """Leaves a number of its data in a global, which the next forward multiplies by."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x) * MAPPED.get("told", 1.0)
        MAPPED["told"] = 1 + 0.1 * (len(MAPPED) + MAPPED.get("told", 0.0)) % 1
        return y


@model(KIND)
class ListsOfTheModel(Layered):
    def forward(self, x: Tensor) -> Any:
        LISTED.append(len(x))
        return super().forward(x) * (1 + 0.1 * (len(LISTED) % 5))


@model(KIND)
class GlobalOfTheModel(Layered):
    def forward(self, x: Tensor) -> Any:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return super().forward(x) * (1 + 0.1 * (COUNT % 5))


@model(KIND)
class ContextOfTheModel(Layered):
    """Sets a context variable for its blocks, and takes it back."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda _m, _a, out: out if CONTEXT.get() is None else out * CONTEXT.get())

    def forward(self, x: Tensor) -> Any:
        token = CONTEXT.set(0.5)
        y = super().forward(x)
        CONTEXT.reset(token)
        return y


@model(KIND)
class CollectsInContext(Layered):
    """As models of transformers collect hidden states: hooks put them in a list of a context variable."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(self.collect)

    @staticmethod
    def collect(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if (seen := CONTEXT.get()) is not None:
            seen.append(output)

    def forward(self, x: Tensor) -> Any:
        seen: list[Tensor] = []
        token = CONTEXT.set(seen)
        y = super().forward(x)
        CONTEXT.reset(token)
        return y + seen[1]
