"""The models: small enough for two cores, and unlike each other in what a step of them is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Adds what a module makes of its input to the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Of four heads, to a memory or to itself."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.rest = nn.Linear(width, 2 * width)
        self.causal = causal

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None = None) -> Tensor:  # noqa: N803  (shapes)
        keys, values = self.rest(x_BTD if memory_BSD is None else memory_BSD).chunk(2, dim=-1)
        heads = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.queries(x_BTD), keys, values))
        found = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Of a transformer; with a memory it attends to that, too."""

    def __init__(self, width: int, causal: bool, crossed: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + crossed))
        self.own = Attention(width, causal)
        self.cross = Attention(width, causal=False) if crossed else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """A decoder, whose head is heavy if its vocabulary is large."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Translation(nn.Module):
    """An encoder and a decoder, whose blocks all read what the encoder made."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.encoder = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, causal=True, crossed=True) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = x = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def perceptron() -> nn.Module:
    """That of README's ten lines."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


def convolutional(channels: int = 16) -> nn.Module:
    """Its later blocks are wider, and their pictures smaller."""

    def block(width: int) -> nn.Module:
        return Residual(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()))

    wide = 2 * channels
    stem, down = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, wide, 3, stride=2, padding=1)
    early, late = [block(channels) for _ in range(4)], [block(wide) for _ in range(4)]
    return nn.Sequential(stem, *early, down, *late, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10))


def words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model, the rows of one of its microbatches, and a batch of so many rows with its target."""

    make: Callable[[], nn.Module]
    rows: int
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def _tokens(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocabulary, (rows, 48)), torch.randint(0, vocabulary, (rows, 48))


MODELS = {
    "tiny MLP": Case(perceptron, 4, lambda n: (torch.randn(n, 64), torch.randn(n, 64)), F.mse_loss),
    "GPT": Case(lambda: Language(256), 2, lambda n: _tokens(n, 256), words),
    "CNN": Case(convolutional, 4, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))), F.cross_entropy),
    "encoder-decoder": Case(Translation, 2, lambda n: _tokens(n, 256), words),
    "heavy head": Case(lambda: Language(8192), 2, lambda n: _tokens(n, 8192), words),
}
