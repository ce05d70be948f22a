"""How much Python an action takes: counted in calls, which no other load on the machine changes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock

STEADY = 8
"""After so many steps features have looked at all forwards and backwards that they look at closely."""

MAX = {"1f1b": 44, "zb-h1": 70}
"""Calls per action on a linear layer, its own and its message's included: 42 and 66 with Python 3.11."""


def calls_of_a_step(schedule: str, microbatches: int) -> tuple[int, int]:
    """The calls of a step, and its forwards, backwards, or parts of them."""
    x, y = torch.randn(microbatches, 4), torch.randn(microbatches, 4)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    with penstock.pipeline(
        layers, (x,), ranks=2, microbatches=microbatches, schedule=schedule, loss=F.mse_loss
    ) as pipe:
        for _ in range(STEADY):
            pipe.step(x, target=y)
        sys.setprofile(count)
        try:
            pipe.step(x, target=y)
        finally:
            sys.setprofile(None)
        return found, sum(action.op.is_compute for row in pipe.schedule.rows for action in row)


@pytest.mark.parametrize("schedule", MAX)
def test_an_action_takes_few_calls(schedule: str) -> None:
    (few, actions), (many, more_actions) = (calls_of_a_step(schedule, microbatches) for microbatches in (8, 16))
    assert many - few <= MAX[schedule] * (more_actions - actions)


class Looks(nn.Linear):
    """Notes the functions of Penstock that call it, from `Engine.run_step` on."""

    found: set[tuple[str, ...]]

    def forward(self, x: Tensor) -> Tensor:
        names: list[str] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_qualname != "Engine.run_step":
            if Path(penstock.__file__).parent in Path(frame.f_code.co_filename).parents:
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:
            self.found.add(tuple(reversed(names)))
        return super().forward(x)


def test_two_frames_of_penstock_call_the_code_of_a_plain_stage() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    layers = [Looks(4, 4) for _ in range(3)]
    Looks.found = set()
    with penstock.pipeline(layers, (x,), ranks=3, microbatches=4, loss=F.mse_loss) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        pipe.evaluate(x, target=y)
    assert Looks.found == {("run_actions", "run_forward")}
