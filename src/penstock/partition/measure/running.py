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
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[Tensor],
        held: Collection[nn.Parameter],
        written: Collection[int],
        device: torch.device,
    ) -> None:
        self._clock = Clock(device)
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
        self.outputs: Sequence[Tensor] = ()
        self.saved_bytes = 0

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

        _, entering = self._enter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = self._module(*entering)
        self.outputs = [value.detach() for value in made]
        self.saved_bytes = sum(size for storage, size in sizes.items() if storage not in self._own)
        roots, seeds = _seeded(made)
        if roots:
            torch.autograd.backward(roots, seeds)
        self._clock.settle()

    def run(self) -> None:
        """Times the forward and the whole backward."""
        _, entering = self._enter()
        start = self._clock.mark()
        made = self._module(*entering)
        middle = self._clock.mark()
        roots, seeds = _seeded(made)
        before = self._clock.mark()
        if roots:
            torch.autograd.backward(roots, seeds)
        end = self._clock.mark()
        self._clock.settle()
        self.runs.forward.append(self._clock.seconds(start, middle))
        self.runs.backward.append(self._clock.seconds(before, end))

    def run_input_gradient(self) -> None:
        """Times the gradient of the inputs alone, and the forward that runs again right before it."""
        leaves, entering = self._enter()
        begin = self._clock.mark()
        made = self._module(*entering)
        middle = self._clock.mark()
        roots, seeds = _seeded(made)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        start = self._clock.mark()
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        end = self._clock.mark()
        self._clock.settle()
        self.runs.again.append(self._clock.seconds(begin, middle))
        self.runs.input_gradient.append(self._clock.seconds(start, end))

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

    def _enter(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves, and copies of them, which the forward may update in place."""
        leaves = [value.detach().requires_grad_(needs) for value, needs in self._inputs]
        return leaves, [leaf.clone() for leaf in leaves]


def _seeded(made: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results that take a gradient, and a gradient for each."""
    roots = [value for value in made if value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]
