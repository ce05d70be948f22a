"""Runs one unit, on a copy of its own: parameters, buffers and attributes, which hooks and backwards may write to."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum
from itertools import accumulate, islice
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.profiler import record_function

from penstock._base.compat import cpu_allocations, size_of, storage_of
from penstock._base.errors import PartitionError
from penstock.costs import SPLIT_SECONDS, UnitCost
from penstock.partition.measure.clock import Clock, settle
from penstock.partition.measure.footprint import Footprint, ends_of, usual_loss
from penstock.partition.stages.stage import Stage

LATER_PARTS = "penstock: later parts begin"


class Backward(Enum):
    """How a backward runs: all at once, for the inputs' gradients alone, or in two parts, as a runtime splits it."""

    WHOLE = "whole"
    INPUTS = "inputs"
    SPLIT = "split"


class Splitting(Protocol):
    """Runs the backward of one unit in two parts. It learns from a first forward and backward how to."""

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap a forward."""

    def learn(self, roots: Sequence[GradientEdge | None]) -> None:
        """Follow a forward; `roots`: what its backward starts from."""

    def input_gradients(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap the backward that passes the inputs' gradients on."""

    def weight_gradients(self, microbatch: int) -> None:
        """Do what that left."""


Splits = Callable[[Callable[[], Mapping[str, nn.Parameter]], nn.Module, torch.device], Splitting]
"""Makes one for a module with these parameters, by name."""

Step = Iterator[Sequence[Tensor]]
"""A microbatch on its way through one unit: each `next` runs a part of it. See `RunningUnit.step`."""

PARTS = 3
"""Of a step, before its times are noted."""


class RunningUnit:
    """A unit that can be run again and again. `begin` comes first.

    Args:
        stage: the unit as a stage.
        inputs: what it takes, in the order of the stage's meta.
        shared: parameters of other units, to which attributes may lead: they are not copied.
        splits: makes what splits its backward; None: that is not measured.

    Attributes:
        inputs: what it runs on by itself.
        runs: the seconds of the parts of each run, by how the backward ran.
        saved: what autograd kept of the first run for its backward, besides parameters and buffers.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[Tensor], shared: Iterable[nn.Parameter] = (), splits: Splits | None = None
    ) -> None:
        self.inputs, self._needs = inputs, [i.meta.requires_grad for i in stage.meta.inputs]
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in shared}
        module = self._module = copy.deepcopy(stage.module, memo).to(stage.device)
        self._trains, self._passes_on = any(p.requires_grad for p in module.parameters()), any(self._needs)
        self._splits = splits is not None
        self._splitting: Splitting | None = None
        if splits is not None and self._trains:
            self._splitting = splits(lambda: dict(module.named_parameters()), module, stage.device)
        self.runs: dict[Backward, list[tuple[float, ...]]] = defaultdict(list)
        self._clock, self._device = Clock(stage.device), stage.device
        self.saved = Footprint(0, 0)

    def step(self, inputs: Sequence[Tensor], backward: Backward = Backward.WHOLE, *, with_loss: bool = False) -> Step:
        """Run a microbatch in parts: its forward, which yields the results without their graph; its backward, or the
        first part of a split one; the rest. Each is timed, and noted when the step is resumed after these three: first
        the device has to settle. A backward that has one part runs whole. `with_loss`: `usual_loss` follows."""
        splitting = self._splitting if backward is Backward.SPLIT else None
        if splitting is None and not (backward is Backward.INPUTS and self._trains and self._passes_on):
            backward = Backward.WHOLE
        leaves, given = self._entering(inputs)
        marks = [self._clock.mark()]
        with nullcontext() if splitting is None else splitting.forward(0):
            made = list(self._module(*given))
        if splitting is not None:
            splitting.learn(ends_of(made)[0])
        marks.append(self._clock.mark())
        edges, ones = ends_of(usual_loss(made) if with_loss else made)
        given.clear()
        yield [made.pop(0).detach() for _ in range(len(made))]  # and keeps none itself
        gradients = ones()
        marks.append(self._clock.mark())
        if backward is Backward.INPUTS:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(edges, wanted, gradients, allow_unused=True)
        elif edges:
            with nullcontext() if splitting is None else splitting.input_gradients(0):
                torch.autograd.backward(edges, gradients)
        marks.append(self._clock.mark())
        del leaves, edges, gradients
        yield ()
        if splitting is not None:
            marks.append(self._clock.mark())
            splitting.weight_gradients(0)
            marks.append(self._clock.mark())
        yield ()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        self.runs[backward].append(tuple(self._clock.seconds(start, end) for start, end in pairs))

    def _entering(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves of these values, and copies of them, which a forward may update in place."""
        leaves = [value.detach().requires_grad_(needs) for value, needs in zip(inputs, self._needs, strict=True)]
        return leaves, [leaf.clone() for leaf in leaves]

    def begin(self) -> Sequence[Tensor]:
        """Run untimed: memory is allocated, kernels are chosen, and a split backward shows what can be deferred. Return
        the results."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[storage_of(tensor)] = size_of(tensor)
            return tensor

        _, given = self._entering(self.inputs)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made: Sequence[Tensor] = self._module(*given)
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            sizes.pop(storage_of(tensor), None)
        of_inputs, of_outputs = (tuple(sizes.get(storage_of(each), 0) for each in values) for values in (given, made))
        self.saved = Footprint(sum(sizes.values()), 0, of_inputs, of_outputs)
        outputs = [value.detach() for value in made]
        edges, ones = ends_of(made)
        if edges:
            torch.autograd.backward(edges, ones())
        if self._splitting is not None:
            try:
                _go_on(self.step(self.inputs, Backward.SPLIT), PARTS)
            except PartitionError:  # its backward is not split in a pipeline either
                self._splitting = None
        settle(self._device)
        return outputs

    def run(self, backward: Backward = Backward.WHOLE) -> None:
        """Time the forward and such a backward."""
        step = self.step(self.inputs, backward)
        _go_on(step, PARTS)
        settle(self._device)
        next(step, None)

    def taken(self, *, with_loss: bool = False) -> Footprint | None:
        """Return the real memory of an untimed run, besides parameters and their gradients; None if it is not
        reported."""
        return _really_taken(self._device, self.step(self.inputs, with_loss=with_loss), 1)

    def waiting_bytes(self) -> int | None:
        """Return the bytes that the first part of a split backward leaves for the second; None if that is not
        measured."""
        if self._splitting is None:
            return 0 if self._splits else None  # all is done in the first part
        found = _really_taken(self._device, self.step(self.inputs, Backward.SPLIT), 2)
        return None if found is None else found.kept

    @property
    def seconds(self) -> float:
        """The last forward and whole backward."""
        return sum(self.runs[Backward.WHOLE][-1])

    def medians(self, backward: Backward = Backward.WHOLE) -> list[float]:
        """Return the median seconds of each part of a run; none if there was no backward of this kind."""
        return [*map(median, zip(*self.runs[backward], strict=True))]

    def timed(self, cost: UnitCost) -> UnitCost:
        """Return the cost with the medians of its times. I of a unit that has no W is its whole backward."""
        forward, whole = self.medians()
        again, inputs = self.medians(Backward.INPUTS) or (None, whole / 2)
        if not (self._trains and self._passes_on):
            inputs = whole if self._passes_on else 0.0
        totals = [sum(run) for run in self.runs[Backward.WHOLE]]
        low, _, high = quantiles(totals, n=4, method="inclusive") if len(totals) > 1 else (0.0, 0.0, 0.0)
        apart: dict[str, Any] = dict(zip(SPLIT_SECONDS, self.medians(Backward.SPLIT), strict=False))
        return replace(
            cost,
            forward_seconds=forward,
            input_gradient_seconds=min(inputs, whole),
            weight_gradient_seconds=whole - min(inputs, whole),
            spread=(high - low) / (forward + whole) if forward + whole else 0.0,
            recompute_seconds=again,
            **apart,
        )


def _go_on(step: Step, parts: int) -> None:
    for _ in islice(step, parts):
        pass


def _really_taken(device: torch.device, step: Step, first: int) -> Footprint | None:
    """Return the memory of a step by the allocator, kernels' own buffers included: after its first `first` parts, and
    the peak beyond that; None if it is not reported."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _go_on(step, first)
        kept = torch.cuda.memory_allocated(device) - before
        _go_on(step, PARTS - first)
        return Footprint(kept, torch.cuda.max_memory_allocated(device) - before - kept)

    def both() -> None:
        _go_on(step, first)
        with record_function(LATER_PARTS):
            _go_on(step, PARTS - first)

    seen = cpu_allocations(both) if device.type == "cpu" else None
    if seen is None or (LATER_PARTS, 0) not in seen:
        return None
    held = [0, *accumulate(size for _, size in seen)]
    kept = held[seen.index((LATER_PARTS, 0))]
    return Footprint(kept, max(held) - kept)
