"""Losses: what they read of the model, what they keep, and what they return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.registry import Layered, mean, model

KIND = "losses"
LEFT: list[Any] = []
STATE: dict[str, Any] = {}


class Leaves(Layered):
    """Leaves its layers' outputs for the loss."""

    left: Any = None
    told: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        LEFT.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            layer.left = x.square().mean()
            LEFT.append(layer.left)
        return x


class LeavesNumbers(Leaves):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.layers[0].told = float(mean(x).mean())
        STATE["told"] = self.layers[0].told
        return y


def reading(name: str, read: Any, kind: type[nn.Module] = Leaves, **options: Any) -> None:
    """Adds a case whose loss adds what `read` gives of the model."""
    loss = lambda built: lambda output, target: F.mse_loss(output, target) + read(built)  # noqa: E731
    model(KIND, name=name, loss=loss, **options)(kind)


reading("ReadsLeftAttributes", lambda built: sum(layer.left for layer in built.layers))
reading("ReadsAGlobalList", lambda built: sum(LEFT))
reading("ReadsANumber", lambda built: built.layers[0].told, LeavesNumbers)
reading("ReadsAGlobalNumber", lambda built: STATE["told"], LeavesNumbers)
reading("ReadsAWeight", lambda built: 0.01 * built.layers[0].weight.square().sum(), Layered)
reading("ReadsAWeightOfItsStage", lambda built: 0.01 * built.layers[3].weight.square().sum(), Layered)
reading("ReadsADetachedWeight", lambda built: built.layers[0].weight.detach().mean(), Layered)
reading("ReadsAWeightsNumber", lambda built: float(built.layers[0].weight.detach().mean()), Layered)
reading("ReadsTheData", lambda built: float(built.layers[0].weight.data.sum()), Layered)
reading("ReadsAllWeights", lambda built: 0.01 * sum(p.square().sum() for p in built.parameters()), Layered)
reading("ReadsTheMode", lambda built: 0.5 * built.training, Layered)


class OfLoss(nn.Module):
    """A loss with state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


class CountsCalls(OfLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(output, target) * (1 + 0.1 * (self.calls % 5))


class RemembersLoss(OfLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value, last = super().forward(output, target), self.last
        self.last = value.detach()
        return value if last is None else value * (1 + last)


class AddsUpLoss(OfLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = super().forward(output, target)
        self.total += value.detach()
        return value / (1 + self.total.clone())


class CountsGlobally(OfLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        STATE["calls"] = STATE.get("calls", 0) + 1
        return super().forward(output, target) * (1 + 0.1 * (STATE["calls"] % 5))


class TellsTheModel(nn.Module):
    """Its loss leaves a number that the first layer reads in the next forward."""

    def __init__(self, built: Any) -> None:
        super().__init__()
        object.__setattr__(self, "built", built)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(output, target)
        self.built.layers[0].told = 1 + 0.1 * (getattr(self.built.layers[0], "told", 1.0) % 0.7)
        return value


class Listens(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda layer, _a, out: out * getattr(layer, "told", 1.0))


class ListensOnTheLast(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(lambda _l, _a, out: out * STATE.get("told", 1.0))


class TellsByGlobal(OfLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        STATE["told"] = 1 + 0.1 * (STATE.get("told", 1.0) % 0.7)
        return super().forward(output, target)


for kind in (CountsCalls, RemembersLoss, AddsUpLoss, CountsGlobally):
    model(KIND, name=f"Loss{kind.__name__}", loss=lambda _b, kind=kind: kind())(Layered)
model(KIND, name="LossTellsTheFirstLayer", loss=TellsTheModel)(Listens)
model(KIND, name="LossTellsTheLastLayer", loss=lambda _b: TellsByGlobal())(ListensOnTheLast)


@model(KIND, loss=lambda _b: lambda output, target: F.mse_loss(output[0], target) + output[1])
class ReturnsItsPenalty(Leaves):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, sum(layer.left for layer in self.layers)


@model(KIND, loss=lambda _b: lambda output, target: F.mse_loss(output, target) * 0 + sum(LEFT[:2]))
class OnlyThePenalty(Leaves):
    """The loss depends on what the first stage left alone."""


@model(KIND, loss=lambda _b: lambda output, target: F.mse_loss(output.data.clone().requires_grad_(), target))
class DetachesItsOutput(Layered):
    """Nothing gets a gradient."""


@model(KIND, loss=lambda _b: lambda output, target: (output - target).square().sum() / int((target > 0).sum()))
class DividesByLabels(Layered):
    pass


@model(KIND, ties=True)
class TiedEnds(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


@model(KIND)
class DetachedTie(Layered):
    """The last layer uses the first one's weight without a gradient."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(super().forward(x), self.layers[0].weight.detach())


@model(KIND)
class TiedByData(Layered):
    """Two parameters share memory, which no name shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight.data = self.layers[0].weight.data


@model(KIND, name="TiedByAView", ties=True)
class TiedByAView(Layered):
    """The last layer's weight is the first one's, transposed, in its forward."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(super().forward(x), self.layers[0].weight.t())
