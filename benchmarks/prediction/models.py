"""The models: a perceptron, a convolutional network, a GPT of our own code, and a Llama of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from penstock.demo import model as demo


class Perceptron(nn.Module):
    """Eight residual blocks."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Convolutional(nn.Module):
    """Pictures of 32 x 32: eight residual blocks, wider and smaller after the first four, and ten classes."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.early = nn.ModuleList(self._block(channels) for _ in range(4))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.late = nn.ModuleList(self._block(2 * channels) for _ in range(4))
        self.head = nn.Linear(2 * channels, 10)

    @staticmethod
    def _block(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.early:
            x = x + block(x)
        x = self.down(x)
        for block in self.late:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=8,
            num_attention_heads=4,
            vocab_size=512,
            use_cache=False,
        )
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def words(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def words_of_llama(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return words(output["logits"], target)


@dataclass(frozen=True)
class Case:
    """A model, the rows of one of its microbatches, and a batch of so many rows with its target."""

    make: Callable[[], nn.Module]
    rows: int
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def _tokens(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocabulary, (rows, length)), torch.randint(0, vocabulary, (rows, length))


MODELS = {
    "perceptron": Case(Perceptron, 64, lambda n: (torch.randn(n, 256), torch.randn(n, 256)), squares),
    "CNN": Case(Convolutional, 8, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))), classes),
    "GPT": Case(
        lambda: demo.GPT(width=128, heads=4, layers=8, context=64, dropout=0.0),
        2,
        lambda n: _tokens(n, 64, demo.VOCABULARY),
        words,
    ),
    "Llama": Case(llama, 2, lambda n: _tokens(n, 64, 512), words_of_llama),
}
