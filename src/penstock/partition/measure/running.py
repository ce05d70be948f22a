"""Runs one unit, on a copy of its own: parameters, buffers and attributes, which hooks and backwards may write to."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat import size_of, storage_of
from penstock.partition.measure.clock import Clock
from penstock.partition.measure.costs import Times
from penstock.partition.stages.stage import Stage


@dataclass
class Runs:
    """The times of a unit's runs, in seconds."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_gradient: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The last forward and whole backward."""
        return sum(each[-1] for each in (self.forward, self.backward) if each)

    def clear(self) -> None:
        """Forgets them."""
        for each in (self.forward, self.backward, self.input_gradient, self.again):
            each.clear()


class RunningUnit:
    """A unit that can be run again and again.

    Args:
        stage: the unit as a stage.
        inputs: what it takes, in the order of the stage's meta.
        held: every parameter of the model; those of other units, to which attributes may lead, are not copied.
        written: those that the forward updates, which are copied wherever they are.

    Attributes:
        outputs: what the first run returned.
        saved_bytes: what the first run kept for its backward, besides parameters and buffers.
        held_bytes: its parameters and their gradients.
        runs: what it took.
        clock: of its device.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[Tensor],
        held: Collection[nn.Parameter],
        written: Collection[int],
        device: torch.device,
    ) -> None:
        self._inputs = [(value, i.meta.requires_grad) for value, i in zip(inputs, stage.meta.inputs, strict=True)]
        mine = {id(parameter) for parameter in stage.parameters.values()}
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for p in held
            if id(p) not in written and id(p) not in mine
        }
        self._module = copy.deepcopy(stage.module, memo).to(device)
        self._own = {storage_of(t) for t in (*self._module.parameters(), *self._module.buffers())}
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self.runs = Runs()
        self.clock = Clock(device)
        self.held_bytes = sum(size_of(p) * (2 if p.requires_grad else 1) for p in self._module.parameters())
        self.outputs: Sequence[Tensor] = ()
        self.saved_bytes = 0

    @property
    def inputs(self) -> list[Tensor]:
        """What it runs on by itself."""
        return [value for value, _ in self._inputs]

    @property
    def splits(self) -> bool:
        """Whether its backward has both an I and a W."""
        return bool(self._trained) and self.passes_gradient_on

    @property
    def passes_gradient_on(self) -> bool:
        """Whether any of its inputs takes a gradient."""
        return any(needs for _, needs in self._inputs)

    def first(self) -> None:
        """The run that is not timed: memory is allocated, kernels are chosen."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[storage_of(tensor)] = size_of(tensor)
            return tensor

        _, entering = self._enter(self.inputs)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = self._module(*entering)
        self.outputs = [value.detach() for value in made]
        self.saved_bytes = sum(size for storage, size in sizes.items() if storage not in self._own)
        roots, seeds = _seeded(made)
        if roots:
            torch.autograd.backward(roots, seeds)
        self.clock.settle()

    def run(self) -> None:
        """Times the forward and the whole backward."""
        self._alone(whole=True)

    def run_input_gradient(self) -> None:
        """Times the gradient of the inputs alone, and the forward that runs again right before it."""
        self._alone(whole=False)

    def _alone(self, *, whole: bool) -> None:
        one = self.forward(self.inputs)
        one.backward(whole=whole)
        self.clock.settle()
        one.note(self.runs)

    def forward(self, inputs: Sequence[Tensor]) -> Passing:
        """Runs the forward on such inputs, between two marks."""
        leaves, entering = self._enter(inputs)
        start = self.clock.mark()
        made = self._module(*entering)
        return Passing(self.clock, leaves, made, [start, self.clock.mark()])

    def times(self) -> Times:
        """The medians. I of a unit that has no W is its whole backward."""
        runs = self.runs
        forward, backward = statistics.median(runs.forward), statistics.median(runs.backward)
        if not self.splits:
            input_gradient = backward if self.passes_gradient_on else 0.0
        elif runs.input_gradient:
            input_gradient = min(statistics.median(runs.input_gradient), backward)
        else:
            input_gradient = backward / 2
        whole = [one + other for one, other in zip(runs.forward, runs.backward, strict=True)]
        quarters = statistics.quantiles(whole, n=4, method="inclusive") if len(whole) > 1 else [0.0, 0.0, 0.0]
        middle = forward + backward
        spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
        again = statistics.median(runs.again) if runs.again else None
        return Times(forward, input_gradient, backward - input_gradient, spread, again)

    def operations(self) -> None:
        """Running counts nothing."""

    def _enter(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves, and copies of them, which the forward may update in place."""
        pairs = zip(inputs, self._inputs, strict=True)
        leaves = [value.detach().requires_grad_(needs) for value, (_, needs) in pairs]
        return leaves, [leaf.clone() for leaf in leaves]


class Passing:
    """A microbatch on its way through one unit: the forward has run.

    Args:
        leaves: what went in.
        made: what came out.
        marks: before and after the forward.
    """

    def __init__(self, clock: Clock, leaves: Sequence[Tensor], made: Sequence[Tensor], marks: list[Any]) -> None:
        self._clock, self._leaves, self._made, self._marks = clock, leaves, made, marks
        self._whole = True

    @property
    def outputs(self) -> list[Tensor]:
        """What came out, without its graph."""
        return [value.detach() for value in self._made]

    def backward(self, *, whole: bool = True) -> None:
        """Runs the backward between two marks, and frees what it needed. `whole`: or only the inputs' gradients."""
        self._whole = whole
        roots, seeds = _seeded(self._made)
        self._marks.append(self._clock.mark())
        if not whole:
            wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        elif roots:
            torch.autograd.backward(roots, seeds)
        self._marks.append(self._clock.mark())
        self._leaves, self._made = (), ()

    def note(self, runs: Runs) -> None:
        """Notes the times, once the device has settled."""
        start, middle, before, end = self._marks
        forward, backward = self._clock.seconds(start, middle), self._clock.seconds(before, end)
        (runs.forward if self._whole else runs.again).append(forward)
        (runs.backward if self._whole else runs.input_gradient).append(backward)


def _seeded(made: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results that take a gradient, and a gradient for each."""
    roots = [value for value in made if value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]
