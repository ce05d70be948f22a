"""The states in which `verify` compares: other values and weights in each step, an evaluation, and what code keeps.

That blocks which talk through what one process shares are found, as in several processes, is in test_proof_table.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Microbatch, Pipeline, VerificationReport, verify

WIDTH = 7


def proof(make: Callable[[], nn.Module], **options: Any) -> VerificationReport:
    torch.manual_seed(0)
    x, target = torch.randn(2, 8, WIDTH)
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cuts": ["1"], "leaf_modules": ["0", "1"], **options}
    return verify(make, (x,), target=target, loss_fn=F.mse_loss, full_batch=False, **given)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(x)


def test_what_code_keeps_is_left_as_it_was() -> None:
    assert proof(lambda: nn.Sequential(Counts(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))).ok
    assert not Counts.calls


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
