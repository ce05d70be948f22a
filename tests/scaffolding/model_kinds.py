"""Small models of each kind, for tests that run each under many schedules; those of transformers are in the zoo."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scaffolding.models import GPT, Case, ConvNet, SkipsTwice, squared_error, token_error

ROWS = 11


def mlp() -> Case:
    layers = [m for _ in range(8) for m in (nn.Linear(33, 33), nn.Tanh())]
    return Case(nn.Sequential(*layers, nn.Linear(33, 5)), _noise(33), {}, torch.randn(ROWS, 5), squared_error)


def tied_gpt_with_dropout(layers: int = 8) -> Case:
    ids = torch.randint(0, 37, (ROWS, 8))
    model = GPT(vocabulary=37, width=24, layers=layers, dropout=0.1)
    return Case(model, (ids[:, :-1],), {}, ids[:, 1:], token_error)


def skips() -> Case:
    return Case(SkipsTwice(33), _noise(33), {}, torch.randn(ROWS, 33), squared_error)


def batch_norm() -> Case:
    return Case(ConvNet(), (torch.randn(ROWS, 3, 6, 6),), {}, torch.randn(ROWS, 3), squared_error)


def _noise(width: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, width),)


EXAMPLES = {f.__name__: f for f in (mlp, tied_gpt_with_dropout, skips, batch_norm)}
