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

from penstock._base.compat import cpu_allocations, storage_bytes, storage_id
from penstock._base.errors import PartitionError
from penstock.costs import SPLIT_SECONDS, UnitCost
from penstock.partition.measure.clock import Clock, synchronize
from penstock.partition.measure.footprint import Footprint, backward_roots, typical_losses
from penstock.partition.stages.stage import Stage

LATER_PARTS = "penstock: later parts begin"


class Backward(Enum):
    """How a backward runs: all at once, for the inputs' gradients alone, or in two parts, as a runtime splits it."""

    WHOLE = "whole"
    INPUTS = "inputs"
    SPLIT = "split"


class BackwardSplitter(Protocol):
    """Runs the backward of one unit in two parts. It learns from a first forward and backward how to."""

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap a forward."""

    def learn(self, roots: Sequence[GradientEdge | None]) -> None:
        """Follow a forward; `roots`: what its backward starts from."""

    def input_gradients(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap the backward that passes the inputs' gradients on."""

    def weight_gradients(self, microbatch: int) -> None:
        """Do what that left."""


MakeSplitter = Callable[[Callable[[], Mapping[str, nn.Parameter]], nn.Module, torch.device], BackwardSplitter]
"""Makes one for a module with these parameters, by name."""

Step = Iterator[Sequence[Tensor]]
"""A microbatch on its way through one unit: each `next` runs a part of it. See `UnitRunner.step`."""

PARTS = 3
"""Of a step, before its times are noted."""


class UnitRunner:
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
        self,
        stage: Stage,
        inputs: Sequence[Tensor],
        shared: Iterable[nn.Parameter] = (),
        splits: MakeSplitter | None = None,
    ) -> None:
        self.inputs, self._needs = inputs, [i.meta.requires_grad for i in stage.meta.inputs]
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in shared}
        module = self._module = copy.deepcopy(stage.module, memo).to(stage.device)
        self._trains, self._passes_on = any(p.requires_grad for p in module.parameters()), any(self._needs)
        self._splits = splits is not None
        self._splitting: BackwardSplitter | None = None
        if splits is not None and self._trains:
            self._splitting = splits(lambda: dict(module.named_parameters()), module, stage.device)
        self.runs: dict[Backward, list[tuple[float, ...]]] = defaultdict(list)
        self._clock, self._device = Clock(stage.device), stage.device
        self.saved = Footprint(0, 0)

    def step(self, inputs: Sequence[Tensor], backward: Backward = Backward.WHOLE, *, with_loss: bool = False) -> Step:
        """Run a microbatch in parts: its forward, which yields the results without their graph; its backward, or the
        first part of a split one; the rest. Each is timed, and noted when the step is resumed after these three: first
        the device has to settle. A backward that has one part runs whole. `with_loss`: `typical_losses` follows."""
        splitting = self._splitting if backward is Backward.SPLIT else None
        if splitting is None and not (backward is Backward.INPUTS and self._trains and self._passes_on):
            backward = Backward.WHOLE
        leaves, copies = self._fresh_inputs(inputs)
        marks = [self._clock.mark()]
        with nullcontext() if splitting is None else splitting.forward(0):
            outputs = list(self._module(*copies))
        if splitting is not None:
            splitting.learn(backward_roots(outputs)[0])
        marks.append(self._clock.mark())
        edges, make_ones = backward_roots(typical_losses(outputs) if with_loss else outputs)
        copies.clear()
        yield [outputs.pop(0).detach() for _ in range(len(outputs))]  # and keeps none itself
        gradients = make_ones()
        marks.append(self._clock.mark())
        if backward is Backward.INPUTS:
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(edges, trained, gradients, allow_unused=True)
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

    def _fresh_inputs(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves of these values, and copies of them, which a forward may update in place."""
        leaves = [value.detach().requires_grad_(needs) for value, needs in zip(inputs, self._needs, strict=True)]
        return leaves, [leaf.clone() for leaf in leaves]

    def begin(self) -> Sequence[Tensor]:
        """Run untimed: memory is allocated, kernels are chosen, and a split backward shows what can be deferred. Return
        the results."""
        sizes: dict[int, int] = {}

        def record_size(tensor: Tensor) -> Tensor:
            sizes[storage_id(tensor)] = storage_bytes(tensor)
            return tensor

        _, copies = self._fresh_inputs(self.inputs)
        with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
            results: Sequence[Tensor] = self._module(*copies)
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            sizes.pop(storage_id(tensor), None)
        input_bytes, output_bytes = (tuple(sizes.get(storage_id(t), 0) for t in values) for values in (copies, results))
        self.saved = Footprint(sum(sizes.values()), 0, input_bytes, output_bytes)
        outputs = [value.detach() for value in results]
        edges, make_ones = backward_roots(results)
        if edges:
            torch.autograd.backward(edges, make_ones())
        if self._splitting is not None:
            try:
                _advance(self.step(self.inputs, Backward.SPLIT), PARTS)
            except PartitionError:  # its backward is not split in a pipeline either
                self._splitting = None
        synchronize(self._device)
        return outputs

    def run(self, backward: Backward = Backward.WHOLE) -> None:
        """Time the forward and such a backward."""
        step = self.step(self.inputs, backward)
        _advance(step, PARTS)
        synchronize(self._device)
        next(step, None)

    def real_memory(self, *, with_loss: bool = False) -> Footprint | None:
        """Return the real memory of an untimed run, besides parameters and their gradients; None if it is not
        reported."""
        return _measure_memory(self._device, self.step(self.inputs, with_loss=with_loss), 1)

    def deferred_bytes(self) -> int | None:
        """Return the bytes that the first part of a split backward leaves for the second; None if that is not
        measured."""
        if self._splitting is None:
            return 0 if self._splits else None  # all is done in the first part
        memory = _measure_memory(self._device, self.step(self.inputs, Backward.SPLIT), 2)
        return None if memory is None else memory.kept

    @property
    def seconds(self) -> float:
        """The last forward and whole backward."""
        return sum(self.runs[Backward.WHOLE][-1])

    def medians(self, backward: Backward = Backward.WHOLE) -> list[float]:
        """Return the median seconds of each part of a run; none if there was no backward of this kind."""
        return [*map(median, zip(*self.runs[backward], strict=True))]

    def timed(self, cost: UnitCost) -> UnitCost:
        """Return the cost with the medians of its times. I of a unit that has no W is its whole backward."""
        forward, backward = self.medians()
        recompute, input_part = self.medians(Backward.INPUTS) or (None, backward / 2)
        if not (self._trains and self._passes_on):
            input_part = backward if self._passes_on else 0.0
        totals = [sum(run) for run in self.runs[Backward.WHOLE]]
        low, _, high = quantiles(totals, n=4, method="inclusive") if len(totals) > 1 else (0.0, 0.0, 0.0)
        split_seconds: dict[str, Any] = dict(zip(SPLIT_SECONDS, self.medians(Backward.SPLIT), strict=False))
        return replace(
            cost,
            forward_seconds=forward,
            input_gradient_seconds=min(input_part, backward),
            weight_gradient_seconds=backward - min(input_part, backward),
            spread=(high - low) / (forward + backward) if forward + backward else 0.0,
            recompute_seconds=recompute,
            **split_seconds,
        )


def _advance(step: Step, parts: int) -> None:
    for _ in islice(step, parts):
        pass


def _measure_memory(device: torch.device, step: Step, num_parts: int) -> Footprint | None:
    """Return the memory of a step by the allocator, kernels' own buffers included: after its first `num_parts` parts,
    and the peak beyond that; None if it is not reported."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _advance(step, num_parts)
        kept = torch.cuda.memory_allocated(device) - before
        _advance(step, PARTS - num_parts)
        return Footprint(kept, torch.cuda.max_memory_allocated(device) - before - kept)

    def run_parts() -> None:
        _advance(step, num_parts)
        with record_function(LATER_PARTS):
            _advance(step, PARTS - num_parts)

    allocations = cpu_allocations(run_parts) if device.type == "cpu" else None
    if allocations is None or (LATER_PARTS, 0) not in allocations:
        return None
    totals = [0, *accumulate(size for _, size in allocations)]
    kept = totals[allocations.index((LATER_PARTS, 0))]
    return Footprint(kept, max(totals) - kept)
