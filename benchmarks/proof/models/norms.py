"""Batch norms and other statistics that forwards update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.registry import BOTH_WAYS, WIDTH, Block, Layered, blocks, mean, model

KIND = "statistics"


@blocks(KIND, schedules=BOTH_WAYS)
class BatchNorms(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


@blocks(KIND, schedules=BOTH_WAYS)
class NormalisesByAverages(BatchNorms):
    """Updates its averages first and then normalises by them."""

    def forward(self, x: Tensor) -> Tensor:
        y, norm = self.linear(x), self.norm
        norm(y.detach())
        return torch.tanh(F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=False))


@blocks(KIND)
class NormalisesByTheUpdated(BatchNorms):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.norm(y.detach())
        return torch.tanh((y - self.norm.running_mean) * self.norm.running_var.rsqrt())


@blocks(KIND)
class FunctionalNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().forward(x), self.mu, self.var, training=self.training)


@blocks(KIND, scales=(1.0, 1.0, 200.0, 200.0))
class NormalisesSome(BatchNorms):
    """Only values that the proof's batch has not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if float(x.detach().max()) > 100 else Block.forward(self, x)


@blocks(KIND)
class NormalisesTwice(BatchNorms):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(Block.forward(self, x)))


@blocks(KIND)
class NormalisesUnevenly(BatchNorms):
    """Once more where values ask for it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.norm(y) if float(y.detach()[0, 0]) > 0 else y


@model(KIND)
class SharedNorm(Layered):
    """One norm on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x


@model(KIND, ties=True)
class SharedNormWithoutAverages(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x


@model(KIND, ties=True)
class ReadsANorm(Layered):
    """The model's own forward takes the averages of a layer's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(torch.tanh(self.layers[0](x)))
        return super().forward(x) + self.norm.running_mean.clone()


@model(KIND)
class ReadsACount(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(torch.tanh(self.layers[0](x)))
        return super().forward(x) * (1 + 0.1 * int(self.norm.num_batches_tracked))


@blocks(KIND)
class SwitchesItsNorm(BatchNorms):
    """In evaluation mode for a while, and back."""

    def forward(self, x: Tensor) -> Tensor:
        was = self.norm.training
        self.norm.eval()
        y = super().forward(x)
        self.norm.train(was)
        return y


@model(KIND)
class SwitchesItsMode(Layered):
    """Its forward puts a layer's norm into evaluation mode, for all later forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(self.norm(x))
        self.norm.eval()
        return y


@blocks(KIND)
class SwitchesItsNormLate(BatchNorms):
    """In evaluation mode from its seventh forward on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.norm.train(self.calls < 7 and self.training)
        return super().forward(x)


@model(KIND)
class SpectralNorm(Layered):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.spectral_norm(layer)


@blocks(KIND, schedules=BOTH_WAYS)
class OwnMomentum(Block):
    """Averages whose momentum is one over a count, in numbers of Python."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.count += 1
            self.mean.lerp_(mean(y), 1 / self.count)
        return y - self.mean.clone()


@blocks(KIND)
class CumulativeNorm(Block):
    """Without a momentum: averages of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))
