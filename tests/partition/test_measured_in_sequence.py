"""Units are measured as a microbatch goes through them, if there is time and memory for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from penstock._base.errors import PartitionError
from penstock.costs import Profile
from penstock.partition.cut.candidates import candidates
from penstock.partition.measure import clock, measuring
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.running import MakeSplitter
from penstock.partition.record.attempts import record
from penstock.runtime.split_backward.backward import SplitBackward

LAYERS = 4
X = torch.randn(4, 8)
LONG = 30.0
"""Seconds. All rounds are over long before."""


class Cold(nn.Module):
    """A layer that takes 20 ms if another one ran last, and 1 ms otherwise. The tests' clock goes on only here."""

    now_ms, last = 0, -1

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.layer = index, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x))
        if type(x) is Tensor:  # not while it is recorded
            Cold.now_ms += 1 if Cold.last == self.index else 20
            Cold.last = self.index
            clock.time.ran.append(f"F{self.index}")
            made.register_hook(lambda _: clock.time.ran.append(f"B{self.index}"))
        return made


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the layers did. The clock has the list: what a model can reach is put back after measuring."""
    found: list[str] = []
    Cold.now_ms, Cold.last = 0, -1
    fake = SimpleNamespace(perf_counter_ns=lambda: Cold.now_ms * 1_000_000, ran=found)
    monkeypatch.setattr(clock, "time", fake)
    monkeypatch.setattr(clock, "read_wait_ns", lambda *_: 0)
    return found


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(Cold(index) for index in range(LAYERS)))


def profile_of(model: nn.Module, budget_seconds: float, splits: MakeSplitter | None = None) -> Profile:
    recording = record(model, (X,), {})
    return measure(recording, model, candidates(recording, model, "flops"), (X,), {}, budget_seconds, splits)


def forwards(found: Profile) -> list[float]:
    return [unit.forward_seconds for unit in found.units[1:]]


def test_a_microbatch_goes_through_all_units_and_back(ran: list[str]) -> None:
    """So they are as cold as in a step. A backward that is not split counts whole."""
    found = profile_of(model(), LONG)
    assert forwards(found) == [0.02] * LAYERS
    assert [unit.like for unit in found.units[2:]] == ["1"] * (LAYERS - 1)
    assert all(unit.split == unit for unit in found.units)
    forth, back = [f"F{i}" for i in range(LAYERS)], [f"B{i}" for i in reversed(range(LAYERS))]
    assert ran[-2 * LAYERS :] == [*forth, *back]


def test_without_time_or_memory_one_of_each_kind_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forwards(profile_of(model(), 0.0)) == [0.001] * LAYERS
    monkeypatch.setattr(measuring, "MAX_BYTES", 0)
    assert forwards(profile_of(model(), LONG)) == [0.001] * LAYERS


class Slowly(SplitBackward):
    """Takes 3 ms more for a forward, 5 ms for the first part of a backward, and 7 ms for the second."""

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool = False) -> Iterator[None]:
        with super().forward(microbatch, runs_again=runs_again):
            yield
        Cold.now_ms += 3

    @contextmanager
    def input_gradients(self, microbatch: int) -> Iterator[None]:
        with super().input_gradients(microbatch):
            yield
        Cold.now_ms += 5

    def weight_gradients(self, microbatch: int) -> None:
        super().weight_gradients(microbatch)
        Cold.now_ms += 7
        clock.time.ran.append("W")


@pytest.mark.parametrize("budget_seconds", [0.0, LONG])
def test_split_backwards_are_measured_as_the_runtime_runs_them(budget_seconds: float, ran: list[str]) -> None:
    """The unsplit times stay what they are."""
    found = profile_of(model(), budget_seconds, partial(Slowly, in_order=True))
    if not budget_seconds:  # a single run has no time for them
        assert all(unit.split == unit for unit in found.units)
        return
    for unit in found.units[1:]:
        assert (unit.forward_seconds, unit.input_gradient_seconds, unit.weight_gradient_seconds) == (0.02, 0.0, 0.0)
        assert unit.split.forward_seconds == pytest.approx(0.023)
        assert unit.split.input_gradient_seconds == pytest.approx(0.005)
        assert unit.split.weight_gradient_seconds == pytest.approx(0.007)
    backwards = [text for text in ran if text[0] in "BW"]
    assert "B3 B2 B1 B0 W W W W W" in " ".join(backwards)  # once all gradients of inputs have left


def test_a_unit_that_cannot_be_split_is_measured_whole() -> None:
    class Refusing(Slowly):
        def weight_gradients(self, microbatch: int) -> None:
            raise PartitionError("not here")

    found = profile_of(model(), LONG, partial(Refusing, in_order=True))
    assert all(unit.split == unit for unit in found.units)
    assert forwards(found) == [0.02] * LAYERS
