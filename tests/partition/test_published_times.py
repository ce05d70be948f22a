"""Estimates beside times that were published for A100s: without any calibration, and calibrated by another model."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.costs import Profile, estimate, fit_efficiency
from penstock.costs.hardware import device

A100 = device("a100")
PUBLISHED = json.loads((Path(__file__).parents[1] / "scaffolding" / "published.json").read_text())["tables5and6"]
LAYERS, ROWS = 3, {"1.5B": 6, "14.6B": 1}
"""Of a stage in the middle, and of a microbatch: Qi et al. 2023, table 3."""


class Block(nn.Module):
    """A layer of GPT as Megatron-LM has it: its attention writes the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.heads = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.first(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = self.dropout(torch.softmax(q @ k.transpose(-1, -2), -1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(B, T, D)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


def rows_of(model: str) -> dict[str, float]:
    return next(one for one in PUBLISHED if one["model"] == model)


@functools.cache
def counted(model: str) -> Profile:
    given = rows_of(model)
    width = int(given["hidden"])
    with torch.device("meta"):
        first, *blocks = nn.Linear(width, width), *(Block(width, int(given["heads"])) for _ in range(2))
        layers = nn.Sequential(first, *blocks).to(torch.bfloat16)
    x = torch.zeros(ROWS[model], int(given["seq"]), width, dtype=torch.bfloat16)
    found = penstock.profile(layers, (x,), microbatches=1, device=A100)
    return replace(found, units=found.units[1:2])


def measured(model: str) -> Profile:
    """The same with what was published for a layer."""
    given, profile = rows_of(model), counted(model)
    names = {"forward_seconds": "forward", "input_gradient_seconds": "backward_input"}
    names["weight_gradient_seconds"] = "backward_weight"
    unit = replace(profile.units[0], **{name: given[key] * 1e-6 / LAYERS for name, key in names.items()})
    return replace(profile, units=(unit,), source="measured", device_name="NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("model", ROWS)
def test_forward_and_input_gradient_are_near_without_calibration(model: str) -> None:
    guessed, given = counted(model).units[0], rows_of(model)
    assert LAYERS * guessed.forward_seconds * 1e6 == pytest.approx(given["forward"], rel=0.05)
    assert LAYERS * guessed.input_gradient_seconds * 1e6 == pytest.approx(given["backward_input"], rel=0.1)


@pytest.mark.parametrize(("known", "other"), [tuple(ROWS), tuple(reversed(ROWS))])
def test_one_model_calibrates_for_the_other(known: str, other: str) -> None:
    guessed = estimate(counted(other), A100, fit_efficiency([measured(known)], A100)).units[0]
    assert guessed.seconds == pytest.approx(measured(other).units[0].seconds, rel=0.1)
