"""A module may ask which microbatch is computed, and on which stage: the same answer in all that a step runs."""

from __future__ import annotations

import copy
from collections import defaultdict
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import PartitionError, current_microbatch, current_stage, pipeline
from scaffolding.small import WIDTH, batch

ASKED: SimpleQueue[tuple[str, int | None, int | None]] = SimpleQueue()  # a list would be state that units share


def note(when: str) -> None:
    ASKED.put((when, current_stage(), current_microbatch()))


def asked() -> dict[str, set[tuple[int | None, int | None]]]:
    """What was told since the last call, by when."""
    found = defaultdict(set)
    while not ASKED.empty():
        when, *place = ASKED.get()
        found[when].add(tuple(place))
    return found


class Asks(nn.Linear):
    """Scales by an entry of a table, and notes what it is told: in forward, again, in backward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def inner(self, x: Tensor) -> Tensor:
        note("inner")
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        number = current_microbatch()
        assert number is not None
        note("forward")
        out: Tensor = checkpoint(self.inner, super().forward(x) * self.table[number], use_reentrant=False)
        if out.requires_grad:
            out.register_hook(lambda _: note("backward"))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Asks(), Asks()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def scaled_error(output: Tensor, target: Tensor) -> Tensor:
    number = current_microbatch()
    assert number is not None
    return (output - target).square().mean() * (1 + number)


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "never"), ("gpipe", "always"), ("zb-h1", "never"), ("dualpipe", "never")]
)
def test_a_module_is_told_which_microbatch_is_computed_and_where(schedule: str, recompute: str) -> None:
    torch.manual_seed(0)
    (x, y), model = batch(8), Model()
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": schedule, "recompute": recompute}
    options |= {"loss": scaled_error, "leaf_modules": ["first", "second"]}
    report = penstock.verify(copy.deepcopy(model), (x,), target=y, **options)
    assert report.ok
    assert report.full_batch is not None
    assert report.full_batch.verdict == "warning"  # it has one microbatch, and another factor
    with pipeline(model, (x,), **options) as pipe:
        every = {(stage.index, k) for stage in pipe.stages for k in range(4)}
        if schedule == "dualpipe":  # two copies of each stage, with half of the microbatches each
            every = {(stage, k) for stage, k in every if (stage < 2) == (k < 2)}
        for _ in range(2):
            model.zero_grad()
            asked()
            pipe.step(x, target=y)
            assert asked() == dict.fromkeys(("forward", "inner", "backward"), every)
        asked()
        pipe.evaluate(x, target=y)
        pipe.predict(x)
        assert asked()["forward"] == every
        assert current_microbatch() is None
        assert current_stage() is None


class InItsOwnForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) if current_microbatch() == 0 else x)
        return out


def test_a_forward_that_is_recorded_call_by_call_may_not_ask() -> None:
    x, _ = batch(8)
    with pytest.raises(PartitionError, match=r"test_current.py:\d+ calls penstock.current_microbatch\(\), .*module of"):
        pipeline(InItsOwnForward(), (x,), ranks=2, microbatches=4, loss=scaled_error)
    model = nn.Sequential(InItsOwnForward(), nn.Linear(WIDTH, WIDTH))  # not opened, however the work is balanced
    with pipeline(model, (x,), ranks=2, microbatches=4, loss=scaled_error) as pipe:
        assert pipe.cuts == ("1",)
