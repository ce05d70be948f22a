"""Random draws: outside of modules, in backwards, from generators of the model, and what is left out by chance."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.registry import SPLIT, WIDTH, Block, Layered, blocks, model

KIND = "random draws"


@model(KIND, draws=True)
class Dropouts(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.drop(layer(x))
        return x


@model(KIND, draws=True)
class MadeInForward(Layered):
    def forward(self, x: Tensor) -> Any:
        return nn.Dropout(0.5)(super().forward(x)) if self.training else super().forward(x)


@model(KIND, draws=True)
class Noisy(Layered):
    def forward(self, x: Tensor) -> Any:
        noise, mask = torch.rand(WIDTH), torch.empty(WIDTH).bernoulli_(0.5)
        x = F.dropout(self.layers[0](x) * noise, 0.5, self.training) * mask
        return self.layers[3](self.layers[1](x).relu()) + noise


@model(KIND, draws=True)
class DropsLayers(Layered):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.3):
                x = torch.tanh(layer(x))
        return x


@model(KIND, draws=True)
class DropsLayersByPython(Layered):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if not (self.training and random.random() < 0.3):
                x = torch.tanh(layer(x))
        return x


@model(KIND, draws=True)
class DropsLayersByNumpy(Layered):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if not (self.training and np.random.rand() < 0.3):
                x = torch.tanh(layer(x))
        return x


@model(KIND, draws=True)
class ScalesByPython(Layered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (random.random() if self.training else 1.0)


@model(KIND, draws=True)
class ScalesByNumpy(Layered):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (float(np.random.rand()) if self.training else 1.0)


@blocks(KIND, draws=True)
class BlocksOfPython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() if self.training else 1.0)


@blocks(KIND, draws=True)
class BlocksOfNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (float(np.random.rand()) if self.training else 1.0)


@blocks(KIND)
class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


@model(KIND)
class GeneratorOfTheModel(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


SHARED = torch.Generator().manual_seed(2)


@blocks(KIND)
class SharedGenerator(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=SHARED)


@blocks(KIND)
class OwnPython(Block):
    """A generator of Python's in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.random.random()


@blocks(KIND)
class OwnNumpy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.random.random())


PYTHON, NUMPY = random.Random(3), np.random.default_rng(3)


@blocks(KIND)
class SharedPython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * PYTHON.random()


@blocks(KIND)
class SharedNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(NUMPY.random())


@model(KIND)
class PythonOfTheModel(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.random.random()


@model(KIND)
class Seeds(Layered):
    """Seeds torch's generator in its forward."""

    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(0)
        return super().forward(x + torch.randn(x.shape))


@blocks(KIND)
class SeedsItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x + torch.randn(x.shape))


@model(KIND)
class Forks(Layered):
    def forward(self, x: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            noise = torch.randn(x.shape)
        return super().forward(x + noise)


@blocks(KIND)
class SeedsByCount(Block):
    """Seeds by a count of its own."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return super().forward(x) * torch.rand(x.shape, generator=generator)


class RoundsAtRandom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.rand_like(grad)


@blocks(KIND, draws=True, schedules=SPLIT)
class DrawsInAFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return RoundsAtRandom.apply(super().forward(x))


@blocks(KIND, draws=True, schedules=SPLIT)
class DrawsInAHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.drop(x))
        if y.requires_grad:
            y.register_hook(lambda g: g * torch.rand_like(g))
        return y


@blocks(KIND, draws=True, schedules=SPLIT)
class DrawsInAParametersHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda g: g + torch.randn_like(g))


@blocks(KIND, draws=True, schedules=SPLIT)
class DrawsInAHookByNumpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * float(np.random.rand()))
        return y


@blocks(KIND, draws=True, schedules=SPLIT)
class DrawsInACheckpoint(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.drop(super(DrawsInACheckpoint, self).forward(x)), x, use_reentrant=False)


@blocks(KIND, draws=True, schedules=SPLIT)
class ForgetsInACheckpoint(DrawsInACheckpoint):
    """Its backward draws another mask, on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.drop(Block.forward(self, x))

        return checkpoint(body, x, use_reentrant=False, preserve_rng_state=False)


@model(KIND, draws=True)
class Samples(Layered):
    """As variational autoencoders do."""

    def forward(self, x: Tensor) -> Any:
        mean = torch.tanh(self.layers[0](x))
        drawn = torch.distributions.Normal(mean, 0.1 + self.layers[1](mean).square()).rsample()
        return self.layers[3](torch.tanh(self.layers[2](drawn)))


@model(KIND, draws=True)
class Permutes(Layered):
    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.layers[0](x))
        return super().forward(x[:, torch.randperm(WIDTH)])


@model(KIND, draws=True)
class DrawsForAHook(Layered):
    """The model's own forward draws what a layer's hook uses."""

    noise: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_hook(lambda _l, _a, out: out + self.noise)

    def forward(self, x: Tensor) -> Any:
        self.noise = torch.rand(WIDTH)
        return super().forward(x)


@blocks(KIND, draws=True)
class DropPath(Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.5) if self.training else 1.0
        return x + super().forward(x) * kept


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(x)))


class Droppings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(Dropping() for _ in range(4)), nn.Dropout(0.3)
        self.first = nn.Linear(WIDTH, WIDTH)


@model(KIND, draws=True, schedules=("zb-h1",))
class DrawsOfAllKinds(Droppings):
    def forward(self, x: Tensor) -> Any:
        x = x + torch.randn_like(x) * 0.1
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training) + random.random() * np.random.rand() * torch.rand_like(x)
        return x


def reparametrized(mean: Tensor, scale: Tensor) -> Tensor:
    return torch.distributions.Normal(mean, scale.exp()).rsample()


@model(KIND, draws=True, schedules=("dualpipe",))
class SamplesTwice(Droppings):
    """In a function that several lines call."""

    def forward(self, x: Tensor) -> Any:
        x = reparametrized(self.blocks[0](x), self.blocks[1](x))
        return self.blocks[3](reparametrized(self.blocks[2](x), x))


@model(KIND, draws=True, schedules=("zb-h1",))
class DropsBlocks(Droppings):
    """A dropout that all blocks share draws inside of branches and behind them."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            if random.random() >= 0.5:
                x = x + self.drop(block(x))
        return self.drop(x)


@model(KIND, draws=True, schedules=("dualpipe",))
class DropsNoise(Droppings):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand([]) < 0.5:
                x = x + block(x) + torch.randn_like(x) * 0.1
        return x * torch.rand_like(x)


@model(KIND, draws=True, schedules=("zb-h1",))
class DecidesFirst(Droppings):
    def forward(self, x: Tensor) -> Any:
        x, drops = self.first(x), torch.rand(len(self.blocks))
        for index, block in enumerate(self.blocks):
            if drops[index] < 0.5:
                x = x + self.drop(block(x))
        return x


@model(KIND, draws=True, schedules=("dualpipe",))
class DrawsAroundCheckpoints(Droppings):
    """Each part draws twice, and once more in backward."""

    def forward(self, x: Tensor) -> Any:
        def part(block: nn.Module, x: Tensor) -> Tensor:
            return block(x) + torch.randn_like(x) * torch.rand_like(x)

        for block in self.blocks:
            x = checkpoint(part, block, x, use_reentrant=False)
        return x


@model(KIND, draws=True)
class ScalesEachByBoth(Layered):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * random.random() + np.random.uniform(-1, 1) * 0.1
        return x


@model(KIND, draws=True)
class AddsWhatNumpyDraws(Layered):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) + torch.tensor(np.random.randn(WIDTH), dtype=torch.float32)
        return x


def masked(size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[np.random.choice(size, 3, replace=False)] = True
    return mask


@model(KIND, draws=True)
class MasksByNumpy(Layered):
    """In a function, as SpecAugment does."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            x[:, torch.tensor(masked(WIDTH))] = 0.0
        return x
