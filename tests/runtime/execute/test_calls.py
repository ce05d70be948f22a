"""How much Python an action takes: counted in calls, which no other load on the machine changes."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import penstock

STEADY = 8
"""After so many steps features have looked at all forwards and backwards that they look at closely."""

MAX = 65
"""Calls per forward or backward of a linear layer, its own 27 and its message's included: 61 with Python 3.11."""


def calls_of_a_step(microbatches: int) -> int:
    x, y = torch.randn(microbatches, 4), torch.randn(microbatches, 4)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    with penstock.pipeline(layers, (x,), ranks=2, microbatches=microbatches, loss=F.mse_loss) as pipe:
        for _ in range(STEADY):
            pipe.step(x, target=y)
        sys.setprofile(count)
        try:
            pipe.step(x, target=y)
        finally:
            sys.setprofile(None)
    return found


def test_an_action_takes_few_calls() -> None:
    few, many = 8, 16
    more_actions = 2 * 2 * (many - few)
    assert calls_of_a_step(many) - calls_of_a_step(few) <= MAX * more_actions
