"""What torch tests its own `torch.distributed.pipelining` with, written anew: the same traits, eight layers each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scaffolding.models import Case, squared_error
from zoo.entry import Entry, noise

WIDTH = 6


class Products(nn.Module):
    """Parameters used without a module, layers, and a constant from a buffer that skips a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.register_buffer("constant", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(torch.mm(x, self.first))
        constant = self.constant.clone()
        for layer in self.layers[:4]:
            x = layer(x)
        x = torch.mm(torch.relu(x) + constant, self.second)
        for layer in self.layers[4:]:
            x = torch.relu(layer(x)) + constant
        return x


def example_code() -> Case:
    return Case(Products(), (noise(WIDTH),), {}, noise(WIDTH), squared_error)


class Shifted(Products):
    """A second tensor by keyword, which has a default."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x if y is None else x + y)


def keyword_input() -> Case:
    return Case(Shifted(), (noise(WIDTH),), {"y": noise(WIDTH)}, noise(WIDTH), squared_error)


class Aliased(nn.Module):
    """A parameter and a layer, each under two names and used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.product = self.product_again = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.layer = self.layer_again = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.layer(torch.mm(x, self.product) + y))
        for layer in self.middle:
            x = layer(x)
        return torch.relu(self.layer_again(torch.mm(x, self.product_again)))


def parameter_alias() -> Case:
    return Case(Aliased(), (noise(WIDTH), noise(WIDTH)), {}, noise(WIDTH), squared_error)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y if gate is None else y * gate


class Perceptrons(nn.Module):
    """Blocks in a list, each of which gets the same tensor by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Perceptron() for _ in range(8))

    def forward(self, x: Tensor, **gates: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, **gates)
        return x


def multi_mlp() -> Case:
    return Case(Perceptrons(), (noise(WIDTH),), {}, noise(WIDTH), squared_error)


def multi_mlp_keywords() -> Case:
    return Case(Perceptrons(), (noise(WIDTH),), {"gate": noise(WIDTH)}, noise(WIDTH), squared_error)


class OwnProduct(torch.autograd.Function):
    """A linear layer whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OwnProduct.apply(x, self.weight, self.bias)
        return torch.tanh(y)


def own_function() -> Case:
    layers = nn.Sequential(*(OwnLinear(WIDTH, WIDTH) for _ in range(8)))
    return Case(layers, (noise(WIDTH),), {}, noise(WIDTH), squared_error)


PIPELINING = (
    Entry(example_code, "parameters without a module, a constant over a cut", 8),
    Entry(keyword_input, "a tensor by keyword", 8),
    Entry(
        parameter_alias, "a parameter and a layer under two names", 8, tied=("product", "layer.weight", "layer.bias")
    ),
    Entry(multi_mlp, "blocks in a list", 8),
    Entry(multi_mlp_keywords, "a tensor that every block gets by keyword", 8),
    Entry(own_function, "a backward written by hand", 8),
)
