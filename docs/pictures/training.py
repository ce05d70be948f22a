"""The run that report.py draws: a small transformer reads random text, in two processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import penstock

TOKENS, LENGTH, WIDTH, LAYERS, ROWS, MICROBATCHES = 32, 64, 128, 8, 64, 8


class Text(nn.Module):
    """A decoder of plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and for each its sum with the first one."""
    tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens + tokens[:, :1]) % TOKENS


def make() -> tuple[nn.Module, tuple[Any, ...], Tensor, Any]:
    """For `penstock profile`."""
    torch.manual_seed(0)
    tokens, targets = batch(0)
    return Text(), (tokens,), targets, loss


def main(folder: str, steps: int = 40) -> None:
    model, inputs, _, _ = make()
    record = penstock.trace.runs.RunConfig(folder, total_steps=steps, trace_every=10)
    with penstock.pipeline(
        model, inputs, loss_fn=loss, schedule="zb-v", microbatches=MICROBATCHES, run_dir=record
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-4)
        for step in range(steps):
            tokens, targets = batch(step)
            pipe.step(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
