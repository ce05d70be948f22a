"""One small model with what makes recomputation hard: dropout, batch norm, ties, skips, updates in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 11, 9


class Layer(nn.Module):
    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.selu_(self.norm(self.linear(x)))) + x


class Everything(nn.Module):
    """A weight that is used at both ends, a skip that all stages see, and values that are updated after a cut."""

    def __init__(self, layers: int = 8, *, norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm=norm) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.layers[0](x)
        y = skip
        for layer in self.layers[1:]:
            y = layer(y)
            y = y * 0.75 + skip
            y += 0.25
            y.sin_()
        return F.linear(y, self.layers[0].linear.weight)


def everything(*, norm: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, a batch that divides by nothing, and a target."""
    torch.manual_seed(0)
    return Everything(norm=norm), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
