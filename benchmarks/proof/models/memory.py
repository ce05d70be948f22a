"""Writes that autograd does not see: through `.data`, by numpy, to what a backward still needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.registry import BOTH_WAYS, SPLIT, WIDTH, Block, Layered, blocks, mean, model

KIND = "writes in place and through .data"


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.stray = torch.ones(WIDTH)


@blocks(KIND, schedules=SPLIT)
class WritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.data.mul_(0.5)
        return y


@blocks(KIND)
class WritesInputByNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.detach().numpy()[:] *= 0.5
        return y


@blocks(KIND, schedules=SPLIT)
class WritesWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.9)
        return super().forward(x)


@blocks(KIND, schedules=SPLIT)
class ExchangesWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.9
        return super().forward(x)


@blocks(KIND, schedules=SPLIT)
class BinaryWeight(Block):
    """Computes with the signs of its weight, and has it back before anyone looks."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.data
        self.linear.weight.data = weight.sign()
        y = super().forward(x)
        self.linear.weight.data = weight
        return y


@blocks(KIND)
class WritesWeightForReal(WritesWeight):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * len(x.detach().sum(1).nonzero().tolist()))


@blocks(KIND)
class Clamps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@blocks(KIND, schedules=SPLIT)
class WritesBuffer(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        self.scale.data.mul_(0.9)
        return y


@blocks(KIND, schedules=SPLIT)
class ExchangesBuffer(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        self.scale.data = self.scale * 0.9
        return y


@blocks(KIND, schedules=BOTH_WAYS)
class WritesUnseen(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.scale.data.lerp_(mean(y), 0.5)
        return y - self.scale.clone()


@blocks(KIND, schedules=BOTH_WAYS)
class Averages(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.scale.lerp_(mean(y), 0.5)
        return y - self.scale.clone()


@blocks(KIND, schedules=BOTH_WAYS)
class Replaces(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.scale = self.scale.lerp(mean(y), 0.5)
        return y - self.scale


@blocks(KIND)
class WritesStray(Scaled):
    """A tensor that is neither a parameter nor a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.stray
        self.stray.data.mul_(0.9)
        return y


@blocks(KIND, schedules=BOTH_WAYS)
class WritesStraySeen(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.stray.lerp_(mean(y), 0.5)
        return y - self.stray.clone()


@blocks(KIND)
class WritesCloned(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale.clone()
        self.scale.data.mul_(0.9)
        return y


@blocks(KIND)
class WritesByNumpy(Scaled):
    """A buffer, and its memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale.clone()
        self.scale.numpy()[:] *= 0.9
        return y


@blocks(KIND)
class Codebook(Scaled):
    """The distances save what is updated, but no gradient is taken of the choice."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        chosen = torch.cdist(x, self.scale.diag()).argmin(-1)
        found = nn.functional.one_hot(chosen, WIDTH).to(x) @ self.scale.diag()
        self.scale.data.mul_(0.9).add_(mean(x), alpha=0.1)
        return x + (found - x).detach()


@blocks(KIND)
class Momentum(Block):
    """A copy of its weights that follows them, as in self-supervised models."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH)
        self.target.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.target.weight.data.mul_(0.9).add_(self.linear.weight.data, alpha=0.1)
        return super().forward(x) + self.target(x)


@blocks(KIND)
class MomentumExchanged(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        self.target.weight.data = self.target.weight.data * 0.9 + self.linear.weight.data * 0.1
        return Block.forward(self, x) + self.target(x)


@model(KIND)
class MomentumOfAnother(Layered):
    """The last layer follows the first, which is on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.layers[3].weight.data.lerp_(self.layers[0].weight.data, 0.5)
        return y


@model(KIND)
class WritesAWeightOfAnother(Layered):
    def __init__(self) -> None:
        super().__init__()
        first = [self.layers[0]]
        self.layers[3].register_forward_hook(lambda _l, _a, _o: (first[0].weight.data.mul_(0.9), None)[1])


@model(KIND, schedules=SPLIT)
class WritesBetween(Layered):
    """What enters each layer, once the layer has run."""

    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            if number:
                x.data.mul_(0.5)
            x = y
        return x


@model(KIND)
class WritesModelInput(Layered):
    """The first layer saves the model's input, for the gradient of its weight."""

    def forward(self, x: Tensor) -> Any:
        y = x
        for number, layer in enumerate(self.layers):
            y = torch.tanh(layer(y))
            if number == 2:
                x.data.mul_(0.5)
        return y


@model(KIND)
class WritesModelInputSeen(Layered):
    """In place, before anything else."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.5))


@model(KIND)
class WritesAParameterBetween(Layered):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            self.layers[1].bias.add_(0.01)
        return y


@model(KIND)
class WritesABufferBetween(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = x * self.scale
        self.scale.data.lerp_(mean(x).abs(), 0.1)
        return super().forward(x)


@model(KIND)
class WritesABufferAtTheEnd(Layered):
    """Read on the first stage, written on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x * self.scale)
        self.scale.data.lerp_(mean(y).abs(), 0.1)
        return y


@model(KIND)
class StrayInTheModel(Layered):
    """A plain tensor that the model itself adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        self.total += mean(x)
        return x + self.total.clone()


@model(KIND)
class StrayReplacedInTheModel(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        self.total = self.total * 0.5 + mean(x)
        return x + self.total


@model(KIND)
class StrayAtBothEnds(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x + self.total.clone())
        self.total.lerp_(mean(x), 0.5)
        return x


@model(KIND)
class WritesAStrayByItem(Layered):
    """A number of data in a tensor that no module has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        self.total[0] = float(x.detach().mean())
        return x + self.total.clone()


@blocks(KIND, schedules=SPLIT)
class UpdatesWhatItSaved(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        result = x * x
        x.data += 1
        return result


@blocks(KIND, schedules=SPLIT)
class ReadsItsParameterWritten(Block):
    """Updates a parameter that its backward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(1.05)
        return super().forward(x) * self.scale


@blocks(KIND, count=2)
class Twice(Block):
    """Overwrites what it was given, which the model still has."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = h.tanh()
        h.data.zero_()
        return self.second(y) + h
