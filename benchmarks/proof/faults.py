"""Faults of a runtime, planted one by one: does the proof see each, and does it say where it begins?

Each function changes a part of Penstock, for the whole process. Its docstring is the fault. `FAULTS` says what the
report's first difference must name. The last ones are in code that the unsplit model shares.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline, verify
from penstock.partition.record import python_draws
from penstock.partition.record.drawn_values import Chance
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.features import deferred_norm
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.step.step import Steps
from penstock.runtime.transport.routes import LocalChannel

WIDTH, MICROBATCHES = 7, 4


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.drops = nn.ModuleList(nn.Dropout(0.2) for _ in range(4))
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm, drop in zip(self.layers, self.norms, self.drops, strict=True):
            x = drop(torch.tanh(norm(layer(x))))
        return x


class Draws(Model):
    """Draws from Python's and numpy's generators in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + random.random() * np.random.rand()
        return x


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@dataclass(frozen=True)
class Fault:
    """`names`: what the report must say of where it begins; `never`: what it must not; `options`: of `verify`."""

    plant: Callable[[], None]
    names: tuple[str, ...]
    make: Callable[[], nn.Module]
    never: str
    options: dict[str, Any]


FAULTS: dict[str, Fault] = {}


def fault(
    *names: str, make: Callable[[], nn.Module] = Model, never: str = "", **options: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a fault."""

    def add(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[plant.__name__] = Fault(plant, names, make, never, options)
        return plant

    return add


def planted(name: str) -> dict[str, Any]:
    """What the proof says with one fault."""
    chosen = FAULTS[name]
    chosen.plant()
    x, target = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))
    options = {"target": target, "loss_fn": F.mse_loss, "cuts": ["layers.2"], "seed": 5, **chosen.options}
    report = verify(chosen.make(), (x,), ranks=2, microbatches=MICROBATCHES, **options)
    words = report.first.text if report.first is not None else report.summary()
    seen = "not seen" if report.ok else "seen"
    if seen == "seen" and not report.differing:
        seen = "seen by the whole batch"
    named = bool(not report.ok and all(word in words for word in chosen.names))
    named = named and not (chosen.never and chosen.never in words)
    return {"seen": seen, "named": named, "says": words if not report.ok else ""}


def code(stage: BoundStage) -> Any:
    """What a stage runs."""
    return stage._functions[0].__self__  # type: ignore[attr-defined]


def around_backward(change: Callable[[BoundStage, int, dict[str, Any]], None]) -> None:
    """Calls `change` after each backward of a stage, with what the gradients were before it."""
    backward = BoundStage.backward

    def changed(self: BoundStage, microbatch: int) -> Callable[[Any], None]:
        run = backward(self, microbatch)

        def run_changed(grads: Any) -> None:
            before = {n: None if p.grad is None else p.grad.clone() for n, p in code(self).named_parameters()}
            run(grads)
            change(self, microbatch, before)

        return run_changed

    BoundStage.backward = changed  # type: ignore[method-assign]


def noting(run: Callable[..., None], running: list[Any], what: Any = 1) -> Callable[..., None]:
    """`run`, during which `running` is not empty."""

    def noted(*args: Any) -> None:
        running.append(what)
        try:
            run(*args)
        finally:
            running.pop()

    return noted


def parameter(stage: BoundStage, name: str) -> Any:
    return dict(code(stage).named_parameters()).get(name)


def after_step(change: Callable[[Pipeline, Any, int], Any]) -> None:
    """Calls `change` after each step, with its number from 0."""
    step, count = Pipeline.step, [0]

    def changed(self: Pipeline, *args: Any, **options: Any) -> Any:
        result = step(self, *args, **options)
        number = count[0] % 3  # a second pass takes the same steps
        count[0] += 1
        change(self, result, number)
        return result

    Pipeline.step = changed  # type: ignore[method-assign]


@fault("step 1", "stage 0", "'layers.1.bias'", "zero")
def a_gradient_is_dropped() -> None:
    """A parameter's gradient is zero."""
    after_step(lambda pipe, _result, _number: dict(pipe.named_parameters())["layers.1.bias"].grad.zero_())


@fault("step 1", "stage 1", "'layers.2.bias'", "missing")
def a_parameter_is_frozen() -> None:
    """A parameter has no gradient."""

    def change(stage: BoundStage, _k: int, _before: Any) -> None:
        if stage.index == 1:
            parameter(stage, "layers.2.bias").grad = None

    around_backward(change)


@fault("step 1, microbatch 0 on stage 1", "number of microbatches")
def the_loss_is_summed() -> None:
    """Gradients are m times as large: the loss is summed over microbatches."""
    seed = LossHead.seed
    LossHead.seed = lambda self, k: MICROBATCHES * seed(self, k)  # type: ignore[method-assign]


@fault("step 1, microbatch 3 on stage 1", "2 times")
def one_microbatch_weighs_twice() -> None:
    """The last microbatch's loss counts twice."""
    seed = LossHead.seed
    LossHead.seed = lambda self, k: seed(self, k) * (1 + (k == 3))  # type: ignore[method-assign]


@fault("step 1 on stage 0", "'layers.0.bias'", "microbatch 1 is there twice")
def a_term_is_added_twice() -> None:
    """A microbatch's gradients are added to those of one stage twice."""

    def change(stage: BoundStage, microbatch: int, before: dict[str, Any]) -> None:
        if stage.index == 0 and microbatch == 1:
            weight = parameter(stage, "layers.0.bias")
            weight.grad = weight.grad + (weight.grad - before["layers.0.bias"])

    around_backward(change)


@fault("step 1 on stage 0", "'layers.0.bias'", "microbatch 3 is missing")
def the_last_microbatch_is_lost() -> None:
    """The last microbatch's gradient is not added."""

    def change(stage: BoundStage, microbatch: int, before: dict[str, Any]) -> None:
        if stage.index == 0 and microbatch == 3:
            parameter(stage, "layers.0.bias").grad = before["layers.0.bias"]

    around_backward(change)


@fault("microbatch 0 on stage 0", "what enters 'layers.0'", "microbatches 0 and 1 are swapped")
def two_microbatches_are_swapped() -> None:
    """The first two microbatches' inputs are swapped, not their targets."""
    inputs = Steps._inputs

    def swapped(self: Steps, *given: Any) -> Any:
        first, second, *rest = inputs(self, *given)
        return [second, first, *rest]

    Steps._inputs = swapped  # type: ignore[method-assign]


@fault("step 1, microbatch 0 on stage 1", "the gradient that reaches 'drops.3'")
def targets_are_swapped() -> None:
    """The first two microbatches' targets are swapped."""
    start = LossHead.begin_step

    def swapped(self: LossHead, targets: Any, *more: Any, **options: Any) -> None:
        targets = targets if targets is None else [targets[1], targets[0], *targets[2:]]
        start(self, targets, *more, **options)

    LossHead.begin_step = swapped  # type: ignore[method-assign]


@fault("step 1, microbatch 2 on stage 1", "what enters 'layers.2'", "value of microbatch 1, the one before")
def a_receive_buffer_is_stale() -> None:
    """A microbatch finds the activations of the one before it."""
    send, kept = LocalChannel.send, dict[Any, Any]()

    def late(self: LocalChannel, microbatch: int, message: Any) -> None:
        kept[id(self), microbatch] = [None if t is None else t.clone() for t in message]
        send(self, microbatch, kept.get((id(self), microbatch - 1), message) if microbatch == 2 else message)

    LocalChannel.send = late  # type: ignore[method-assign]


@fault("step 1, microbatch 2 on stage 0", "the gradient that reaches 'drops.1'", "value of microbatch 1")
def a_gradient_buffer_is_stale() -> None:
    """A microbatch's backward finds the gradient of the one before it."""
    await_grads, kept = BoundStage.await_grads, dict[int, Any]()

    def stale(self: BoundStage, microbatch: int) -> Any:
        wait = await_grads(self, microbatch)

        def wait_stale() -> Any:
            grads = wait()
            kept[microbatch] = [None if g is None else g.clone() for g in grads]
            return [*kept[1]] if microbatch == 2 else grads

        return wait_stale if self.index == 0 else wait

    BoundStage.await_grads = stale  # type: ignore[method-assign]


@fault("step 2, microbatch 0 on stage 1", "what enters 'layers.2'")
def a_buffer_is_reused_in_the_second_step() -> None:
    """The first message of the second step is the first step's."""
    receive, kept = LocalChannel.send, dict[Any, list[Any]]()

    def send(self: LocalChannel, microbatch: int, message: Any) -> None:
        mine = kept.setdefault((id(self), microbatch), [])
        mine.append([None if t is None else t.clone() for t in message])
        receive(self, microbatch, mine[0] if microbatch == 0 and len(mine) == 2 else message)

    LocalChannel.send = send  # type: ignore[method-assign]


@fault("step 1, microbatch 0 on stage 0", "what leaves 'drops.0'")
def dropout_draws_from_another_stream() -> None:
    """In a stage, dropout draws another mask than its own."""
    forward, enter, running = BoundStage.forward, Streams.enter, list[int]()

    def noted(self: BoundStage, microbatch: int) -> Any:
        return noting(forward(self, microbatch), running)

    BoundStage.forward = noted  # type: ignore[method-assign]
    Streams.enter = lambda self, name: enter(self, name + "?" if running else name)  # type: ignore[method-assign]


@fault("when it runs again", "'drops.0'", recompute="always")
def another_mask_when_run_again() -> None:
    """Where a stage runs again in backward, dropout draws another mask."""
    again, enter, running = BoundStage._make_rerun, Streams.enter, list[int]()

    def rerun(self: BoundStage, microbatch: int) -> Any:
        return noting(again(self, microbatch), running)

    BoundStage._make_rerun = rerun  # type: ignore[method-assign]
    Streams.enter = lambda self, name: enter(self, name + "?" if running else name)  # type: ignore[method-assign]


@fault("buffer norms.0", "step 1", recompute="always")
def a_buffer_is_not_restored() -> None:
    """Where a stage runs again, its batch norms count once more."""
    again = BoundStage._make_rerun

    def rerun(self: BoundStage, microbatch: int) -> Any:
        run = again(self, microbatch)

        def run_counting() -> None:
            run()
            for module in code(self).modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.num_batches_tracked += 1

        return run_counting

    BoundStage._make_rerun = rerun  # type: ignore[method-assign]


@fault("buffer norms.2.running_mean", "step 1")
def a_batch_norm_is_counted_twice() -> None:
    """A microbatch enters the averages of a stage twice."""

    def change(stage: BoundStage, microbatch: int, _before: Any) -> None:
        for name, module in code(stage).named_modules():
            if name == "norms.2" and microbatch == 0:
                module.running_mean.mul_(0.9)

    around_backward(change)


@fault("'layers.0.weight'", "stage 1 is missing", make=lambda: Model(tied=True))
def a_tied_term_is_missing() -> None:
    """One stage's term of a tied weight's gradient is lost."""

    def change(stage: BoundStage, _k: int, before: dict[str, Any]) -> None:
        if stage.index == 1:
            for name in ("layers.0.weight", "layers.3.weight"):
                if (weight := parameter(stage, name)) is not None:
                    weight.grad = before[name]

    around_backward(change)


@fault("in evaluation", "output 0 of microbatch 0")
def evaluation_runs_in_training_mode() -> None:
    """`evaluate()` drops activations."""
    forward = BoundStage.forward

    def training(self: BoundStage, microbatch: int) -> Any:
        run = forward(self, microbatch)

        def run_training(args: Any) -> None:
            if not self._context.training:
                code(self).train()
            run(args)

        return run_training

    BoundStage.forward = training  # type: ignore[method-assign]


@fault("step 3, microbatch 0 on stage 0")
def evaluation_leaves_its_mode() -> None:
    """After `evaluate()` the model stays in evaluation mode."""
    evaluate = Pipeline.evaluate

    def leaving(self: Pipeline, *args: Any, **options: Any) -> Any:
        try:
            return evaluate(self, *args, **options)
        finally:
            self.eval()

    Pipeline.evaluate = leaving  # type: ignore[method-assign]


@fault("step 3, microbatch 0 on stage 0", "what leaves 'layers.1'")
def the_third_step_has_old_weights() -> None:
    """An optimizer's step does not reach one weight."""
    step, before = Pipeline.step, dict[str, Tensor]()

    def stale(self: Pipeline, *args: Any, **options: Any) -> Any:
        weight = dict(self.named_parameters())["layers.1.weight"]
        weight.data.copy_(before.setdefault("weight", weight.detach().clone()))
        return step(self, *args, **options)

    Pipeline.step = stale  # type: ignore[method-assign]


@fault("step 1 on stage 0", "'layers.0.weight'", "microbatch 3 is missing", schedule="zb-h1")
def a_weights_part_is_lost() -> None:
    """The second part of a backward does not add one microbatch."""
    weight_backward = BoundStage.weight_backward

    def lost(self: BoundStage, microbatch: int) -> Any:
        run, weight = weight_backward(self, microbatch), parameter(self, "layers.0.weight")

        def run_lost() -> None:
            before = None if weight.grad is None else weight.grad.clone()
            run()
            weight.grad = before

        return run if weight is None or microbatch != 3 else run_lost

    BoundStage.weight_backward = lost  # type: ignore[method-assign]


@fault("step 1, microbatch 0 on stage 1", "what enters 'layers.2'")
def activations_are_rounded() -> None:
    """Activations cross a cut in bfloat16."""
    receive = exact.as_graph_input
    exact.as_graph_input = lambda anchor, buffer: receive(anchor, buffer.bfloat16().float())


@fault("step 1, microbatch 0 on stage 0", "the gradient that reaches 'drops.1'", "number of microbatches")
def gradients_are_averaged_at_the_cut() -> None:
    """Gradients that cross a cut are divided by the number of microbatches."""
    await_grads = BoundStage.await_grads

    def divided(self: BoundStage, microbatch: int) -> Any:
        wait = await_grads(self, microbatch)
        return wait if self.index else lambda: [g if g is None else g / MICROBATCHES for g in wait()]

    BoundStage.await_grads = divided  # type: ignore[method-assign]


@fault("step 2 on stage 0", "'layers.0.bias'")
def gradients_of_the_step_before_stay() -> None:
    """A step's gradient is added to that of the step before, which was set to None."""
    kept: dict[str, Tensor] = {}

    def change(pipe: Pipeline, _result: Any, number: int) -> None:
        weight = dict(pipe.named_parameters())["layers.0.bias"]
        mine = weight.grad.clone()
        if number:
            weight.grad += kept["bias"]
        kept["bias"] = mine

    after_step(change)


@fault("output 0 of microbatch 0", "step 1")
def outputs_come_in_another_order() -> None:
    """The step's result has the outputs of two microbatches swapped."""
    step = Pipeline.step

    def swapped(self: Pipeline, *args: Any, **options: Any) -> Any:
        result = step(self, *args, **options)
        first, second, *rest = result.outputs
        return replace(result, _outputs=(second, first, *rest))

    Pipeline.step = swapped  # type: ignore[method-assign]


@fault("loss", "step 1")
def the_loss_that_is_told_is_not_divided() -> None:
    """The gradients are right; the reported loss is the sum."""
    totals = LossHead.totals
    LossHead.totals = lambda self: [t if t is None else t * 4 for t in totals(self)]  # type: ignore[method-assign]


@fault("what enters 'layers.2'", "1.5 times what it should be")
def activations_are_scaled() -> None:
    """Activations are 1.5 times as large behind a cut."""
    receive = exact.as_graph_input
    exact.as_graph_input = lambda anchor, buffer: receive(anchor, buffer.mul_(1.5))


@fault("what enters 'layers.2'", "no more than rounding", never="grows")
def activations_are_a_little_off() -> None:
    """Activations are off by no more than rounding behind a cut."""
    receive = exact.as_graph_input
    exact.as_graph_input = lambda anchor, buffer: receive(anchor, buffer.mul_(1 + 1e-6))


@fault("no more than rounding, which grows step by step", make=plain, cuts=None)
def activations_are_off_by_more_in_each_step() -> None:
    """Rounding of activations is larger in each step."""
    receive, step, count = exact.as_graph_input, Pipeline.step, [-1]

    def begin(self: Pipeline, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return step(self, *args, **options)

    Pipeline.step = begin  # type: ignore[method-assign]
    exact.as_graph_input = lambda anchor, buffer: receive(anchor, buffer.mul_(1 + 1e-6 * (count[0] % 3)))


@fault("what leaves 'layers.1'", "it is what leaves 'drops.0': a layer between is left out")
def a_layer_is_left_out() -> None:
    """A stage does not run one of its layers."""
    run, forward, running = BoundStage.forward, nn.Linear.forward, list[Any]()

    def noted(self: BoundStage, microbatch: int) -> Any:
        return noting(run(self, microbatch), running, dict(code(self).named_modules()).get("layers.1"))

    BoundStage.forward = noted  # type: ignore[method-assign]
    nn.Linear.forward = lambda self, x: x * 1 if self in running else forward(self, x)  # type: ignore[method-assign]


@fault("output 0 of microbatch 0", "step 1", make=Draws, cuts=None)
def drawn_numbers_are_frozen() -> None:
    """What the model's own forward draws from Python and numpy is what its recording drew."""

    def frozen(self: Chance, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        self._generators = python_draws.generator_states()
        return value

    Chance._draw = frozen  # type: ignore[method-assign]


LABELS = torch.tensor([0, -100, 1, 2, 3, -100, -100, 4, 5, 6, 1, -100])


@fault(
    "0.125 times what it should be: 1 over the number of labels that count",
    target=LABELS,
    loss_fn=F.cross_entropy,
    reduction=lambda labels: (labels != -100).sum(),
)
def the_loss_is_divided_by_the_labels_that_count() -> None:
    """The loss is divided by the number of labels that count once more."""
    seed = LossHead.seed
    LossHead.seed = lambda self, k: seed(self, k) / 8  # type: ignore[method-assign]


# -- in what the unsplit model shares ---------------------------------------------------------------------------------


@fault("buffer norms.0.running_mean", deferred_batch_norm=True)
def deferred_norms_count_twice() -> None:
    """Shared: averages of batch norms are committed twice after a step (`deferred_batch_norm=True`)."""
    commit = deferred_norm._commit

    def twice(*given: Any) -> None:
        commit(*given)
        commit(*given)

    deferred_norm._commit = twice


@fault("step 1")
def masks_repeat_in_every_microbatch() -> None:
    """Shared: the number of the microbatch is missing from the key of random streams."""
    begin = Streams.begin
    Streams.begin = lambda self, k, *more, **options: begin(self, 0, *more, **options)  # type: ignore[method-assign]


@fault("the batch is not the sum of its microbatches", make=plain, cuts=None)
def weights_of_microbatches_are_wrong() -> None:
    """Shared: the first microbatch's loss weighs twice as much."""
    seeds = exact.seeds
    exact.seeds = lambda *given: [2 * seeds(*given)[0], *seeds(*given)[1:]]
