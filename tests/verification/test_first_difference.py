"""The report names where a difference begins, and what it looks like: each usual fault of a runtime is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline, Report, verify
from penstock.runtime.exact import rules as exact
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.loss.loss import LossHead

WIDTH = 7


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return x


def proof(**options: Any) -> Report:
    x, target = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cuts": ["layers.2"], "seed": 5, "whole_batch": False}
    return verify(Tied(), (x,), target=target, loss_fn=F.mse_loss, **{**given, **options})


def begins(report: Report, *words: str) -> None:
    assert report.first is not None, report.summary()
    assert report.summary().startswith("first difference: step ")
    for word in words:
        assert word in report.first.text, report.first.text


def code(stage: BoundStage) -> Any:
    """What a stage runs."""
    return stage._functions[0].__self__  # type: ignore[attr-defined]


def noting(run: Callable[..., None], running: list[int]) -> Callable[..., None]:
    """`run`, during which `running` is not empty."""

    def noted(*args: Any) -> None:
        running.append(1)
        try:
            run(*args)
        finally:
            running.pop()

    return noted


def test_nothing_begins_where_all_is_right() -> None:
    report = proof()
    assert report.ok, report.summary()
    assert report.first is None


def test_a_module_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = exact.receive

    def scaled(anchor: Tensor, buffer: Tensor) -> Any:
        return calls(anchor, buffer.mul_(1.5))

    monkeypatch.setattr(exact, "receive", scaled)
    report = proof()
    begins(report, "what enters 'layers.2'", "1.5 times")
    assert ". Downstream, " in report.summary()


# -- more faults ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_divided_by_the_labels_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = LossHead.seed
    monkeypatch.setattr(LossHead, "seed", lambda self, k: seed(self, k) / 5)
    target = torch.tensor([0, -100, 1, 2, 3, -100, -100, 4])
    weight = lambda labels: (labels != -100).sum()  # noqa: E731
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    report = verify(
        Tied(), (x,), target=target, loss_fn=F.cross_entropy, reduction=weight, ranks=2, microbatches=4, seed=5
    )
    begins(report, "0.2 times what it should be: 1 over the number of labels that count")


def test_a_layer_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, forward, running = BoundStage.forward, nn.Linear.forward, list[int]()

    def noted(self: BoundStage, microbatch: int) -> Any:
        return noting(run(self, microbatch), running)

    def left_out(self: nn.Linear, x: Tensor) -> Tensor:
        return x * 1 if running and getattr(self, "is_left_out", False) else forward(self, x)

    def make() -> nn.Module:
        model = Tied()
        model.layers[1].is_left_out = True  # type: ignore[assignment]
        return model

    monkeypatch.setattr(BoundStage, "forward", noted)
    monkeypatch.setattr(nn.Linear, "forward", left_out)
    x, target = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    report = verify(make, (x,), target=target, loss_fn=F.mse_loss, ranks=2, microbatches=4, cuts=["layers.2"])
    begins(report, "what leaves 'layers.1'", "it is what enters 'layers.1': a layer between is left out")


@pytest.mark.parametrize("grows", [False, True])
def test_rounding_is_told_from_other_differences(monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    receive, step, steps = exact.receive, Pipeline.step, list[int]()

    def begin(self: Pipeline, *args: Any, **options: Any) -> Any:
        steps.append(1)
        return step(self, *args, **options)

    def rounded(anchor: Tensor, buffer: Tensor) -> Any:
        return receive(anchor, buffer.mul_(1 + 1e-6 * (((len(steps) - 1) % 3) if grows else 1)))

    monkeypatch.setattr(Pipeline, "step", begin)
    monkeypatch.setattr(exact, "receive", rounded)
    begins(proof(), "'layers.2'", "no more than rounding")
    assert ("which grows step by step" in proof().summary()) == grows
