"""A small byte-level GPT in plain PyTorch. It knows nothing about pipelines; `train` cuts it into stages unchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""Tokens are bytes."""


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a residual connection. Maps (batch, time, width)
    to the same shape.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        change: Tensor = self.dropout(self.perceptron(self.perceptron_norm(x)))
        return x + change

    def attend(self, x: Tensor) -> Tensor:
        """Let each position attend to itself and to earlier ones."""
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        output: Tensor = self.attention_output(attended.transpose(1, 2).flatten(2))
        return output


class GPT(nn.Module):
    """Predicts the next byte at each position of a text. The embedding and the output layer share one matrix.

    Args:
        context: the longest text it can take, in bytes.
    """

    def __init__(
        self, width: int = 192, heads: int = 6, layers: int = 4, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.head:
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)  # so that bytes soon become distinct

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes to logits for each next byte: (batch, time) -> (batch, time, 256)."""
        x = self.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of (batch, time, 256) logits, in nats per byte: ln 256 = 5.55 for guessing, 0 if
    certain."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
