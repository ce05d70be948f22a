"""Counters, caches, and state that begins late: after some forwards, or for some values."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.registry import BOTH_WAYS, WIDTH, Block, Layered, blocks, mean, model

COUNTERS, CACHES, LATE = "counters", "caches", "state that begins late"
LARGE = 100.0


# -- counters ---------------------------------------------------------------------------------------------------------


@model(COUNTERS)
class CountsForwards(Layered):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 5))


@model(COUNTERS)
class CountsElsewhere(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Any:
        self.shared.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.shared.calls % 5))


@model(COUNTERS)
class CountsInFloats(Layered):
    rate = 0.0

    def forward(self, x: Tensor) -> Any:
        self.rate = min(1.0, self.rate + 0.05)
        return super().forward(x) * (1 - self.rate)


@model(COUNTERS)
class OnlyCounts(Layered):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


@model(COUNTERS)
class CountsInABuffer(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return super().forward(x) * (1 + 0.1 * self.steps)


@model(COUNTERS)
class CountsInABufferAtBothEnds(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x * (1 + 0.1 * self.steps))
        self.steps += 1
        return y


@model(COUNTERS)
class CountsInAnInteger(Layered):
    """A buffer whose value the forward asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return super().forward(x) * (2.0 if int(self.steps) % 3 == 0 else 1.0)


@model(COUNTERS)
class CountsForABlock(Layered):
    """The model counts; a layer's hook reads."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_hook(lambda _l, _a, out: out * (1 + 0.1 * (self.calls % 5)))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


@model(COUNTERS)
class CountsInABlock(Layered):
    """A layer's hook counts; the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].turns = 0
        self.layers[2].register_forward_hook(lambda layer, _a, _o: setattr(layer, "turns", layer.turns + 1))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + 0.1 * (self.layers[2].turns % 5))


@model(COUNTERS)
class DecidesByABlock(Layered):
    """Detaches every third forward's output of its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].turns = 0

    def forward(self, x: Tensor) -> Any:
        self.layers[1].turns += 1
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.layers[1].turns % 3 == 0:
                x = x.detach()
        return x


@blocks(COUNTERS, schedules=BOTH_WAYS)
class CountsItself(Block):
    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(calls=0, inner=[0])

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.inner[0] += 2
        return super().forward(x) * (self.state.calls % 5) + self.state.inner[0] % 7


@blocks(COUNTERS, schedules=BOTH_WAYS)
class CountsInFloatsItself(Block):
    held = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.held = 0.5 * self.held + 0.1
        return super().forward(x) * (1 + self.held)


@blocks(COUNTERS, schedules=BOTH_WAYS)
class AddsUpData(Block):
    held = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.held = 0.5 * self.held + float(y.detach().mean())
        return y - self.held


@blocks(COUNTERS, schedules=BOTH_WAYS)
class CountsInAnArray(Block):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.array += 1
        return super().forward(x) * (1 + 0.1 * float(self.array[0] % 5))


@model(COUNTERS)
class SharesACounter(nn.Module):
    """Two blocks on different stages share an object that counts."""

    def __init__(self) -> None:
        super().__init__()
        made = [CountsItself() for _ in range(4)]
        made[3].state = made[0].state
        self.blocks = nn.Sequential(*made)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@model(COUNTERS)
class Anneals(Layered):
    """A temperature that its own forward lowers, and a property reads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"temperature": 2.0}

    @property
    def temperature(self) -> float:
        return max(0.5, self.config["temperature"])

    def forward(self, x: Tensor) -> Any:
        self.config["temperature"] *= 0.9
        return super().forward(x / self.temperature)


@model(COUNTERS)
class Alternates(Layered):
    """Takes its layers in another order every second time."""

    turn = False

    def forward(self, x: Tensor) -> Any:
        self.turn = not self.turn
        for layer in self.layers if self.turn else (*self.layers[2:], *self.layers[:2]):
            x = torch.tanh(layer(x))
        return x


@model(COUNTERS)
class CountsModes(Layered):
    """Counts its evaluations alone, and is changed by them."""

    evaluated = 0

    def forward(self, x: Tensor) -> Any:
        self.evaluated += not self.training
        return super().forward(x) * (1 + 0.1 * self.evaluated)


@blocks(COUNTERS)
class CountsModesItself(Block):
    evaluated = 0

    def forward(self, x: Tensor) -> Tensor:
        self.evaluated += not self.training
        return super().forward(x) * (1 + 0.1 * self.evaluated)


# -- caches -----------------------------------------------------------------------------------------------------------


@model(CACHES)
class Tables(Layered):
    memory: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.memory is None:
            self.memory = torch.arange(WIDTH) / WIDTH
        return super().forward(x) + self.memory


@blocks(CACHES)
class Positions(Block):
    """A table made anew when the width changes, as ConViT's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).square().to(x.dtype) / 10
        return super().forward(x + self.table)


@functools.lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width) / width


@blocks(CACHES)
class CachedFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + positions(WIDTH)


@blocks(CACHES)
class CachesAWeight(Block):
    """A copy of its weight from its first forward, which optimizers do not reach."""

    copy: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.copy is None:
            self.copy = self.linear.weight.detach().clone()
        return super().forward(x) + x @ self.copy


@model(CACHES)
class CachesAWeightInTheModel(Layered):
    copy: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.copy is None:
            self.copy = self.layers[0].weight.detach().clone()
        return super().forward(x) + x @ self.copy


@model(CACHES)
class CachesANumberOfAWeight(Layered):
    norm: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.norm is None:
            self.norm = float(self.layers[0].weight.detach().norm())
        return super().forward(x) * self.norm


@blocks(CACHES)
class CachesANumberOfItsWeight(Block):
    norm: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            self.norm = float(self.linear.weight.detach().norm())
        return super().forward(x) * self.norm


@blocks(CACHES)
class CachesByContent(Block):
    """Keeps results by the first entry of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[float, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = round(float(x.detach()[0, 0]), 1)
        if key not in self.results:
            self.results[key] = mean(x)
        return super().forward(x) + self.results[key]


@blocks(CACHES, schedules=BOTH_WAYS)
class Calibrates(Block):
    """Its first microbatches set what all later ones are scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if len(self.history) < 2:
            self.history.append(1 + y.detach().abs().mean())
        return y / self.history[-1]


@model(CACHES)
class CalibratesInTheModel(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if len(self.history) < 2:
            self.history.append(1 + y.detach().abs().mean())
        return y / self.history[-1]


@model(CACHES)
class HookOnce(Layered):
    """The first forward installs hooks, as models of transformers do."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        if not self.calls:
            self.calls = 1
            for layer in self.layers:
                layer.register_forward_hook(lambda _l, _a, out: out * 0.9)
        return super().forward(x)


@blocks(CACHES, schedules=BOTH_WAYS)
class SetsOnce(Block):
    """Initialised by the data of the first call, as activation norms are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.copy_(x.detach().std())
            self.is_set.fill_(True)
        return super().forward(x / self.scale)


@model(CACHES)
class BuildsALayer(Layered):
    """Makes a layer's constant in its first forward, from the shape of its input."""

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.mask = torch.ones(x.shape[0], 1)
        return super().forward(x) * self.mask


# -- state that begins late -------------------------------------------------------------------------------------------


class Late(Layered):
    """Does something else once it has run so many times in training."""

    begins, calls = 0, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += self.training
        y = super().forward(x)
        return y.relu() if self.calls > self.begins else y


model(LATE, name="BeginsInTheMiddleOfTheFirstStep")(type("Late2", (Late,), {"begins": 2}))
model(LATE, name="BeginsInTheSecondStep")(type("Late6", (Late,), {"begins": 6}))
model(LATE, name="BeginsInTheThirdStep")(type("Late9", (Late,), {"begins": 9}))
model(LATE, name="BeginsInTheFourthStep")(type("Late13", (Late,), {"begins": 13}))


class LateBlock(Block):
    begins, calls = 0, 0
    held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y, last = super().forward(x), self.held
        self.held = mean(y) if self.calls > self.begins else None
        return y if last is None else y - last


blocks(LATE, name="FollowsFromTheSecondStep", schedules=BOTH_WAYS)(type("LateBlock6", (LateBlock,), {"begins": 6}))
blocks(LATE, name="FollowsFromTheFourthStep", schedules=BOTH_WAYS)(type("LateBlock13", (LateBlock,), {"begins": 13}))


@blocks(LATE, schedules=BOTH_WAYS, scales=(1.0, 1.0, LARGE, LARGE))
class FollowsForLargeValues(Block):
    """Only values that the proof's batch has not."""

    held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if float(x.detach().abs().max()) < LARGE / 10:
            return y
        last, self.held = self.held, mean(y)
        return y if last is None else y - last


@blocks(LATE, schedules=BOTH_WAYS, scales=(LARGE, LARGE, 1.0, 1.0))
class FollowsForLargeValuesAtFirst(FollowsForLargeValues):
    pass


@model(LATE, scales=(1.0, 1.0, LARGE, LARGE))
class CountsForLargeValues(Layered):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if float(x.detach().abs().max()) > LARGE / 10:
            self.calls += 1
            y = y * self.calls
        return y


@blocks(LATE, scales=(1.0, 1.0, LARGE, LARGE))
class ShrinksOutliers(Block):
    """Writes for some values only."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 50:
            self.linear.weight.data.mul_(0.9)
        return super().forward(x)


@blocks(LATE)
class ChangesWithItsWeight(Block):
    """Once its weight has changed, it is another function."""

    first: Any = None

    def forward(self, x: Tensor) -> Tensor:
        total = float(self.linear.weight.detach().sum())
        self.first = total if self.first is None else self.first
        return super().forward(x) * (1.0 if total == self.first else 0.5)


@model(LATE)
class ChangesWithAWeight(Layered):
    """The model itself looks at a weight."""

    first: Any = None

    def forward(self, x: Tensor) -> Any:
        total = float(self.layers[1].weight.detach().sum())
        self.first = total if self.first is None else self.first
        return super().forward(x) * (1.0 if total == self.first else 0.5)


@model(LATE)
class BranchesOnAWeight(Layered):
    """Which way it goes depends on a parameter that an optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = float(self.layers[3].bias.detach()[0])

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if float(self.layers[3].bias.detach()[0]) == self.threshold else y * 2


@model(LATE)
class AfterAnEvaluation(Layered):
    """An evaluation leaves something that training reads."""

    held: Any = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if not self.training:
            self.held = mean(y)
        return y if self.held is None or not self.training else y - self.held


@blocks(LATE)
class AfterAnEvaluationItself(Block):
    held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            self.held = mean(y)
        return y if self.held is None or not self.training else y - self.held
