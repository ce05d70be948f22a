"""The report names where a difference begins, and what it looks like: each usual fault of a runtime is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline, Report, verify
from penstock.pipe.steps import Steps
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.transport.local import LocalChannel
from scaffolding.proofs import after_each_step

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


def test_the_message_of_the_microbatch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    send, kept = LocalChannel.send, {}

    def late(self: LocalChannel, microbatch: int, message: Any) -> None:
        kept[id(self), microbatch] = [None if t is None else t.clone() for t in message]
        send(self, microbatch, kept.get((id(self), microbatch - 1), message) if microbatch == 2 else message)

    monkeypatch.setattr(LocalChannel, "send", late)
    words = ("microbatch 2 on stage 1", "what enters 'layers.2'", "value of microbatch 1, the one before")
    begins(proof(), *words)


def test_two_microbatches_that_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Steps._inputs

    def swapped(self: Steps, *given: Any) -> Any:
        first, second, *rest = inputs(self, *given)
        return [second, first, *rest]

    monkeypatch.setattr(Steps, "_inputs", swapped)
    begins(proof(), "microbatch 0 on stage 0", "what enters 'layers.0'", "microbatches 0 and 1 are swapped")


def test_a_frozen_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = BoundStage.backward

    def frozen(self: BoundStage, microbatch: int) -> Any:
        run = backward(self, microbatch)

        def run_frozen(grads: Any) -> None:
            run(grads)
            if self.index == 1:
                code(self).get_submodule("layers.2").bias.grad = None

        return run_frozen

    monkeypatch.setattr(BoundStage, "backward", frozen)
    begins(proof(), "on stage 1", "the gradient of 'layers.2.bias', which is computed from the right", "it is missing")


@pytest.mark.parametrize(("factor", "words"), [(2.0, "the term of microbatch 1 is there twice"), (0.0, "is missing")])
def test_a_microbatch_that_counts_wrongly(monkeypatch: pytest.MonkeyPatch, factor: float, words: str) -> None:
    backward = BoundStage.backward

    def wrong(self: BoundStage, microbatch: int) -> Any:
        run = backward(self, microbatch)
        biases = [m.bias for m in code(self).modules() if isinstance(getattr(m, "bias", None), nn.Parameter)]

        def run_wrong(grads: Any) -> None:
            before = [torch.zeros_like(b) if b.grad is None else b.grad.clone() for b in biases]
            run(grads)
            for bias, was in zip(biases, before, strict=True):
                bias.grad = was + (bias.grad - was) * factor

        return run_wrong if self.index == 0 and microbatch == 1 else run

    monkeypatch.setattr(BoundStage, "backward", wrong)
    begins(proof(), "step 1 on stage 0", "the gradient of 'layers.0.bias'", words)


@pytest.mark.parametrize(("factor", "stage", "words"), [(0.0, 1, "is missing"), (2.0, 0, "is there twice")])
def test_the_term_of_a_tie_that_counts_wrongly(
    monkeypatch: pytest.MonkeyPatch, factor: float, stage: int, words: str
) -> None:
    backward = BoundStage.backward

    def wrong(self: BoundStage, microbatch: int) -> Any:
        run = backward(self, microbatch)
        weight: Any = code(self).get_submodule("layers.0" if self.index == 0 else "layers.3").weight

        def run_wrong(grads: Any) -> None:
            before = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            run(grads)
            weight.grad = before + (weight.grad - before) * factor

        return run_wrong if self.index == stage else run

    monkeypatch.setattr(BoundStage, "backward", wrong)
    begins(proof(), "the gradient of 'layers.0.weight'", f"the term of stage {stage} {words}")


def test_another_mask_when_a_stage_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again, enter = BoundStage._again, Streams.enter
    running: list[int] = []

    def rerun(self: BoundStage, microbatch: int) -> Any:
        return noting(again(self, microbatch), running)

    monkeypatch.setattr(BoundStage, "_again", rerun)
    monkeypatch.setattr(Streams, "enter", lambda self, name: enter(self, name + "?" if running else name))
    begins(proof(recompute="always"), "what leaves 'layers.1' when it runs again")


def test_a_module_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = exact.receive

    def scaled(anchor: Tensor, buffer: Tensor) -> Any:
        return calls(anchor, buffer.mul_(1.5))

    monkeypatch.setattr(exact, "receive", scaled)
    report = proof()
    begins(report, "what enters 'layers.2'", "1.5 times")
    assert ". Downstream, " in report.summary()


# -- more faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "4 times what it should be: the number of microbat"),
        (2.0, "2 times what it should be: twice"),
        (0.25, "0.25 times what it should be: 1 over the number"),
    ],
)
def test_gradients_that_are_scaled_twice_or_divided(monkeypatch: pytest.MonkeyPatch, factor: float, words: str) -> None:
    seed = LossHead.seed
    monkeypatch.setattr(LossHead, "seed", lambda self, k: factor * seed(self, k))
    begins(proof(), "step 1, microbatch 0 on stage 1: the gradient that reaches 'layers.3'", words)


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


def test_weights_that_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a copy that the optimizer's step does not reach."""
    step, before = Pipeline.step, dict[str, Tensor]()

    def stale(self: Pipeline, *args: Any, **options: Any) -> Any:
        weight = dict(self.named_parameters())["layers.1.weight"]
        weight.data.copy_(before.setdefault("weight", weight.detach().clone()))
        return step(self, *args, **options)

    monkeypatch.setattr(Pipeline, "step", stale)
    begins(proof(), "step 3, microbatch 0 on stage 0: what leaves 'layers.1'")


def test_an_evaluation_that_is_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Pipeline.evaluate

    def leaving(self: Pipeline, *args: Any, **options: Any) -> Any:
        try:
            return evaluate(self, *args, **options)
        finally:
            self.eval()

    monkeypatch.setattr(Pipeline, "evaluate", leaving)
    report = proof()
    assert {row.step for row in report.wrong} == {3}
    begins(report, "step 3, microbatch 0")


def test_an_evaluation_that_drops_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins there, not in the step after it."""
    forward = BoundStage.forward

    def training(self: BoundStage, microbatch: int) -> Any:
        run = forward(self, microbatch)

        def run_training(args: Any) -> None:
            if not self._context.training:
                code(self).train()
            run(args)

        return run_training

    monkeypatch.setattr(BoundStage, "forward", training)
    x = torch.randn(8, WIDTH)
    layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    report = verify(nn.Sequential(*layers), (x,), loss_fn=lambda out: out.square().mean(), ranks=2, microbatches=4)
    assert "the first is output 0 of microbatch 0 in evaluation on stage 1" in report.summary()


def test_a_gradient_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    after_each_step(monkeypatch, lambda pipe: dict(pipe.named_parameters())["layers.1.bias"].grad.zero_())
    begins(proof(), "step 1 on stage 0: the gradient of 'layers.1.bias'", "it is zero")


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


def test_a_buffer_that_is_wrong_is_the_first_thing_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    after_each_step(monkeypatch, lambda pipe: dict(pipe.named_buffers())["1.running_mean"].mul_(1.1))
    x = torch.randn(8, WIDTH)
    layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    report = verify(nn.Sequential(*layers), (x,), loss_fn=lambda out: out.square().mean(), ranks=2, microbatches=4)
    assert "the first is buffer 1.running_mean on stage" in report.summary()
    assert {row.name.partition(" in ")[2] for row in report.wrong[1:]} == {"evaluation"}
