"""What forwards have left of what their backward uses is kept until then, and no longer."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from penstock import pipeline
from scaffolding.models import squared_error

ODD = 37


class Writes(nn.Module):
    """Updates a parameter that its backward uses, so that nobody else sees a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ODD))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(1.0)
        return torch.tanh(x) * self.scale


def alive() -> int:
    return sum(type(each) is Tensor and each.shape == (ODD,) for each in gc.get_objects())


def test_no_copies_are_left_behind_a_step() -> None:
    model: Any = nn.Sequential(*(Writes() for _ in range(4)))
    x = torch.randn(8, ODD, generator=torch.Generator().manual_seed(0))
    with pipeline(model, (x,), loss=squared_error, ranks=2, microbatches=4, schedule="gpipe") as pipe:
        pipe.step(x, target=x)
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        assert alive() == 0
