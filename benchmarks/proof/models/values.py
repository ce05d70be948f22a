"""Forwards that depend on values or on objects: branches, mixtures, objects that blocks are given and change."""

from __future__ import annotations

import array
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.registry import WIDTH, Block, Layered, blocks, mean, model

VALUES, OBJECTS = "branches on values", "objects that blocks change"


@blocks(VALUES)
class Decides(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if float(x.detach().sum()) > 0 else x - y


@model(VALUES)
class DecidesBetween(Layered):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x if float(x.detach().sum()) > 0 else -x


@blocks(VALUES)
class Routed(Block):
    """An expert for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).sigmoid()
        rows = (gate[:, 0] > 0.5).nonzero()[:, 0]
        return x.index_add(0, rows, self.linear(x[rows])) * gate


class Mixture(Routed):
    """Leaves its auxiliary loss in an attribute."""

    l_aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.l_aux = self.router(x).sigmoid().mean()
        return super().forward(x)


class Mixtures(nn.Module):
    def __init__(self, kind: type[Mixture] = Mixture) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def penalty(built: Any) -> Any:
    return lambda output, target: F.mse_loss(output, target) + sum(block.l_aux for block in built.blocks)


model(VALUES, name="MixturesOfExperts", loss=penalty)(Mixtures)


class Rare(Mixture):
    """Not in every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        before = self.l_aux
        y = super().forward(x)
        if self.calls % 3:
            self.l_aux = before.detach()
        self.calls += 1
        return y


model(VALUES, name="MixturesThatLeaveRarely", loss=penalty)(lambda: Mixtures(Rare))


class Numbers(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.l_aux = float(self.l_aux)
        return y


model(VALUES, name="MixturesThatLeaveNumbers", loss=penalty)(lambda: Mixtures(Numbers))


class Listed(Mixture):
    most = (0.0,)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.most = [float(mean(y).max())]
        return y


model(
    VALUES,
    name="MixturesThatLeaveLists",
    loss=lambda b: lambda o, t: F.mse_loss(o, t) * (1 + b.blocks[0].most[0] + b.blocks[3].most[0]),
)(lambda: Mixtures(Listed))


@model(VALUES)
class CountsRows(Layered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * int((x.detach()[:, 0] > 0).sum())


@blocks(VALUES)
class CountsRowsItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + int((x.detach()[:, 0] > 0).sum()))


@model(VALUES)
class Early(Layered):
    """Leaves the loop once it is small enough."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if float(x.detach().abs().mean()) < 0.2:
                break
        return x


class Given(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.use(given)


class Giving(nn.Module):
    """Makes an object in each forward, which its blocks change."""

    def __init__(self, make: Any, use: Any, *, keeps: bool = False, between: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given(use) for _ in range(4))
        self.make, self.between, self.kept = make, between, make() if keeps else None

    def forward(self, x: Tensor) -> Tensor:
        given = self.make() if self.kept is None else self.kept
        for block in self.blocks:
            x = block(x, given)
            if self.between is not None:
                self.between(given)
        return x


def grows(given: Any) -> float:
    given.add(len(given))
    return float(len(given))


def lengthens(given: Any) -> float:
    given.append(1)
    return float(len(given) % 7)


def counts(given: Any) -> float:
    given += 1
    return float(given[0] % 7)


def adds_up(given: Any) -> float:
    given.count += 1.0
    return float(given.count % 7)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0


class Closing:
    def __init__(self) -> None:
        self.count = 0.0

    def __del__(self) -> None:
        pass


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0.0


OF_KIND: dict[str, tuple[Any, Any]] = {
    "ASet": (set, grows),
    "AList": (list, lengthens),
    "AnNdarray": (lambda: np.zeros(1), counts),
    "AByteArray": (bytearray, lengthens),
    "AnArray": (lambda: array.array("d"), lengthens),
    "AModule": (Counter, adds_up),
    "AnObjectThatCleansUp": (Closing, adds_up),
    "ANamespace": (lambda: SimpleNamespace(count=0.0), adds_up),
    "AnObjectWithSlots": (Slots, adds_up),
    "ARandom": (lambda: random.Random(0), lambda given: given.random()),
    "AGenerator": (lambda: np.random.default_rng(0), lambda given: float(given.random())),
    "ARandomState": (lambda: np.random.RandomState(0), lambda given: float(given.rand())),
}
for given, (make, use) in OF_KIND.items():
    model(OBJECTS, make, use, name=f"Gives{given}")(Giving)
for given in ("ASet", "AList", "AnNdarray", "ANamespace", "AnObjectWithSlots", "AGenerator"):
    model(OBJECTS, *OF_KIND[given], name=f"Keeps{given}")(lambda make, use: Giving(make, use, keeps=True))
model(OBJECTS, set, lambda given: len(given) + 1.0, name="ChangesASetBetween")(
    lambda make, use: Giving(make, use, between=grows)
)
model(OBJECTS, list, lambda given: len(given) + 1.0, name="ChangesAKeptListBetween")(
    lambda make, use: Giving(make, use, keeps=True, between=lengthens)
)


class Cache:
    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.seen = 0


@model(OBJECTS)
class FillsACache(Layered):
    """Blocks append to a cache, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x + cache.keys[0]


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        cache.keys.append(x * (len(cache.keys) + 1))
        cache.seen += 1
        return x + cache.keys[0] * cache.seen
