"""Each rank has its own state: blocks that talk through what one process shares are found, as they would be in several.

What watches for that in recordings is switched off here, so that the proof alone is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Microbatch, Pipeline, Report, verify
from penstock.partition.run.side_channels import SideChannels

WIDTH = 7
SEEN: list[float] = []


def unwatched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideChannels, "run_unit", lambda self, unit, args, kwargs, run: run(args, kwargs))
    patch.setattr(SideChannels, "check_units", lambda self, known: None)
    patch.setattr(SideChannels, "check_call", lambda self, call: None)
    patch.setattr(SideChannels, "check_stateless", lambda self: None)


def proof(make: Callable[[], nn.Module], **options: Any) -> Report:
    torch.manual_seed(0)
    x, target = torch.randn(2, 8, WIDTH)
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cuts": ["1"], "leaves": ["0", "1"], **options}
    return verify(make, (x,), target=target, loss_fn=F.mse_loss, whole_batch=False, **given)


class Through(nn.Module):
    """Scales by a number, and may leave another behind."""

    def __init__(self, factor: Callable[[], float], leave: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.linear, self.factor, self.leave, self.calls = nn.Linear(WIDTH, WIDTH), factor, leave, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.leave is not None:
            self.leave(self.calls)
        return self.linear(x) * self.factor()


def by_a_list_of_the_file() -> nn.Module:
    def leave(calls: int) -> None:
        SEEN.append(calls / 10)

    return nn.Sequential(Through(lambda: 1.0, leave), Through(lambda: 1.0 + sum(SEEN)))


def by_an_attribute() -> nn.Module:
    first = Through(lambda: 1.0, lambda _: None)
    return nn.Sequential(first, Through(lambda: 1.0 + first.calls / 10))


def by_a_shared_cache() -> nn.Module:
    cache: dict[str, float] = {}
    first = Through(lambda: 1.0, lambda calls: cache.update(calls=calls / 10))
    return nn.Sequential(first, Through(lambda: 1.0 + cache.get("calls", 0.0)))


class OfTheClass(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        OfTheClass.calls += 1
        return self.linear(x) * (1 + OfTheClass.calls / 10)


def by_a_class() -> nn.Module:
    return nn.Sequential(OfTheClass(), OfTheClass())


def by_a_tensor() -> nn.Module:
    shared = torch.zeros(())
    return nn.Sequential(
        Through(lambda: 1.0, lambda calls: shared.fill_(calls / 10) and None),
        Through(lambda: 1.0 + shared),  # type: ignore[arg-type, return-value]
    )


CHANNELS = (by_a_list_of_the_file, by_an_attribute, by_a_shared_cache, by_a_class, by_a_tensor)


@pytest.mark.parametrize("make", CHANNELS)
def test_what_stages_leave_for_each_other_in_shared_objects_is_seen(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    unwatched(monkeypatch)
    report = proof(make)
    assert not report.ok
    assert not SEEN
    assert not OfTheClass.calls


def alone(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(make()[0], nn.Linear(WIDTH, WIDTH))  # type: ignore[index]


@pytest.mark.parametrize("make", [by_a_class, by_a_list_of_the_file])
def test_state_that_one_stage_keeps_is_no_difference(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference leaves it as it was."""
    unwatched(monkeypatch)
    report = proof(alone(make))
    assert report.ok, report.summary()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_take_other_values_and_the_last_one_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    step, taken = Pipeline.step, []

    def noting(self: Pipeline, x: Tensor, **options: Any) -> Any:
        taken.append((x.clone(), next(self.parameters()).detach().clone()))
        return step(self, x, **options)

    monkeypatch.setattr(Pipeline, "step", noting)
    assert proof(dropping).ok
    (first, weight), (second, same), (_, moved) = taken
    assert torch.equal(first.roll(2, 0), second)
    assert torch.equal(weight, same)
    assert 0.001 < float((moved - same).norm() / same.norm()) < 0.1


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("given", [list, lambda batches: lambda step: batches[step - 2]], ids=["list", "function"])
def test_other_batches_may_have_other_lengths(given: Any) -> None:
    x, y = torch.randn(6, WIDTH), torch.randn(3, WIDTH)
    report = proof(dropping, batches=given([Microbatch((x,), {}, x), Microbatch((y,), {}, y)]))
    assert report.ok, report.summary()
    assert sum(row.kind == "output" for row in report.rows) == 8


def test_an_evaluation_that_drops_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Pipeline.evaluate

    def training(self: Pipeline, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: F.dropout(x, self.p))
        return evaluate(self, *args, **options)

    monkeypatch.setattr(Pipeline, "evaluate", training)
    assert "in evaluation on stage 1" in proof(dropping).summary()


class OnlyTrains(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError("sampling is not written yet")
        return super().forward(x)


def test_an_evaluation_that_the_model_refuses_is_noted() -> None:
    report = proof(lambda: nn.Sequential(OnlyTrains(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert report.ok
    (note,) = report.notes
    said = "the unsplit model raises NotImplementedError: sampling is not written yet"
    assert note == f"evaluation was not compared: {said}"
