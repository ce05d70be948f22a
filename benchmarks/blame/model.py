"""The model and data of the scripts in this folder, and the unsplit model for `penstock blame`."""

from __future__ import annotations

import os
import random

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 29, 16, 6
OPTIONS = set(os.environ.get("CASE", "").split(","))
ROWS = 7 if "short" in OPTIONS else 8
LAYERS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH) if "batchnorm" in OPTIONS else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if "dropout" in OPTIONS else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if "tie" in OPTIONS:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = random.Random(step)
    tokens = torch.tensor([[draws.randrange(WORDS) for _ in range(LENGTH + 1)] for _ in range(ROWS)])
    labels = tokens[:, 1:].clone()
    if "ignored" in OPTIONS:
        for row in range(ROWS):
            labels[row, : row % 4 + (row > 3)] = -100
    inputs = tokens[:, :-1].contiguous()
    return (torch.ones_like(inputs) if "alike" in OPTIONS else inputs), labels


def model() -> Net:
    torch.manual_seed(1)
    return Net()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    if "sgd" in OPTIONS:
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def make() -> tuple[object, ...]:
    more: dict[str, object] = {"batches": batch, "optimizer": optimizer_of}
    if "clip" in OPTIONS:
        more["clip_grad_norm"] = 0.5
    tokens, labels = batch(0)
    return model(), (tokens,), labels, loss_of, more
