"""Runs one unit, on a copy of its own: parameters, buffers and attributes, which hooks and backwards may write to."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from penstock._base.compat import cpu_allocations, size_of, storage_of
from penstock.errors import PartitionError
from penstock.partition.measure.clock import Clock
from penstock.partition.measure.costs import SplitTimes, Times
from penstock.partition.measure.footprint import Footprint, usual_loss
from penstock.partition.stages.stage import Stage

BACKWARD_BEGINS = "penstock: backward begins"


class Backward(Enum):
    """How a backward runs: all at once, for the inputs' gradients alone, or in two parts, as a runtime splits it."""

    WHOLE = "whole"
    INPUTS = "inputs"
    SPLIT = "split"


class Splitting(Protocol):
    """Runs the backward of one unit in two parts. It learns from a first forward and backward how to."""

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Wraps a forward."""

    def learn(self, roots: Sequence[GradientEdge | None]) -> None:
        """Follows a forward; `roots`: what its backward starts from."""

    def input_gradients(self, microbatch: int) -> AbstractContextManager[None]:
        """Wraps the backward that passes the inputs' gradients on."""

    def weight_gradients(self, microbatch: int) -> None:
        """Does what that left."""


Splits = Callable[[Callable[[], Mapping[str, nn.Parameter]], nn.Module, torch.device], Splitting]
"""Makes one for a module with these parameters, by name."""


@dataclass
class Runs:
    """The times of a unit's runs, in seconds."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_gradient: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    split_forward: list[float] = field(default_factory=list)
    split_input_gradient: list[float] = field(default_factory=list)
    split_weight_gradient: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The last forward and whole backward."""
        return sum(each[-1] for each in (self.forward, self.backward) if each)

    def clear(self) -> None:
        """Forgets them."""
        for each in fields(self):
            getattr(self, each.name).clear()


class RunningUnit:
    """A unit that can be run again and again.

    Args:
        stage: the unit as a stage.
        inputs: what it takes, in the order of the stage's meta.
        held: every parameter of the model; those of other units, to which attributes may lead, are not copied.
        written: those that the forward updates, which are copied wherever they are.
        splits: makes what splits its backward; None: that is not measured.

    Attributes:
        outputs: what the first run returned.
        saved: what autograd kept of the first run for its backward, besides parameters and buffers.
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
        splits: Splits | None = None,
    ) -> None:
        self._inputs = [(value, i.meta.requires_grad) for value, i in zip(inputs, stage.meta.inputs, strict=True)]
        mine = {id(parameter) for parameter in stage.parameters.values()}
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for p in held
            if id(p) not in written and id(p) not in mine
        }
        self._module = copy.deepcopy(stage.module, memo).to(device)
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._splits = splits
        self._splitting: Splitting | None = None
        if splits is not None and self._trained:
            self._splitting = splits(lambda: dict(self._module.named_parameters()), self._module, device)
        self.runs = Runs()
        self.clock = Clock(device)
        self._device = device
        self.held_bytes = sum(size_of(p) * (2 if p.requires_grad else 1) for p in self._module.parameters())
        self.outputs: Sequence[Tensor] = ()
        self.saved = Footprint(0, 0)

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

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            given = entering(self._inputs)[1]
            made: Sequence[Tensor] = self._module(*given)
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            sizes.pop(storage_of(tensor), None)
        of_inputs, of_outputs = (tuple(sizes.get(storage_of(each), 0) for each in values) for values in (given, made))
        self.saved = Footprint(sum(sizes.values()), 0, of_inputs, of_outputs)
        self.outputs = [value.detach() for value in made]
        roots, seeds = seeded(made)
        if roots:
            torch.autograd.backward(roots, seeds)
        self.learn()
        self.clock.settle()

    def taken(self, *, with_loss: bool = False) -> Footprint | None:
        """What a run really takes, untimed, besides parameters and their gradients; None if nothing says.

        `with_loss`: whether `usual_loss` follows.
        """
        edges, grads = list[GradientEdge](), list[tuple[Any, ...]]()

        def forward() -> None:
            made = self._module(*entering(self._inputs)[1])
            for value in usual_loss(made) if with_loss else made:
                if value.requires_grad:
                    edges.append(get_gradient_edge(value))
                    grads.append((tuple(value.shape), value.stride(), value.dtype))

        def backward() -> None:
            if edges:
                made = [torch.empty_strided(*size, dtype=dtype, device=self._device) for *size, dtype in grads]
                torch.autograd.backward(edges, [seed.fill_(1) for seed in made])

        return _really_taken(self._device, forward, backward)

    def waiting_bytes(self) -> int | None:
        """What the first part of a split backward leaves for the second; None if that is not measured."""
        if self._splits is None:
            return None
        if self._splitting is None:
            return 0  # all is done in the first part
        passing: list[Passing] = []

        def first_part() -> None:
            passing.append(self.forward(self.inputs, Backward.SPLIT))
            passing[0].backward()

        def second_part() -> None:
            passing[0].weights()

        found = _really_taken(self._device, first_part, second_part)
        return None if found is None else found.kept

    def learn(self) -> None:
        """Runs a first split backward, which shows what can be put off. Comes before any that is timed."""
        if self._splitting is None:
            return
        try:
            one = self.forward(self.inputs, Backward.SPLIT)
            one.backward()
            one.weights()
        except PartitionError:  # its backward is not split in a pipeline either
            self._splitting = None

    def run(self, backward: Backward = Backward.WHOLE) -> None:
        """Times the forward and such a backward."""
        one = self.forward(self.inputs, backward)
        one.backward()
        one.weights()
        self.clock.settle()
        one.note(self.runs)

    def forward(self, inputs: Sequence[Tensor], backward: Backward = Backward.WHOLE) -> Passing:
        """Runs the forward on such inputs, between two marks. A backward that has one part only will run whole."""
        splitting = self._splitting if backward is Backward.SPLIT else None
        if splitting is None and not (backward is Backward.INPUTS and self.splits):
            backward = Backward.WHOLE
        needs = [needs for _, needs in self._inputs]
        leaves, given = entering(zip(inputs, needs, strict=True))
        start = self.clock.mark()
        with nullcontext() if splitting is None else splitting.forward(0):
            made = self._module(*given)
        if splitting is not None:
            splitting.learn([get_gradient_edge(value) for value in made if value.requires_grad])
        return Passing(self.clock, leaves, made, [start, self.clock.mark()], backward, splitting)

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
        return Times(forward, input_gradient, backward - input_gradient, spread, again, self._split_times())

    def _split_times(self) -> SplitTimes | None:
        """None if no run was split."""
        runs = self.runs
        if not runs.split_forward:
            return None
        columns = runs.split_forward, runs.split_input_gradient, runs.split_weight_gradient
        return SplitTimes(*map(statistics.median, columns))


class Passing:
    """A microbatch on its way through one unit: the forward has run.

    Args:
        leaves: what went in.
        made: what came out.
        marks: before and after the forward.
        way: how the backward will run.
        splitting: what splits it.
    """

    def __init__(
        self,
        clock: Clock,
        leaves: Sequence[Tensor],
        made: Sequence[Tensor],
        marks: list[Any],
        way: Backward,
        splitting: Splitting | None,
    ) -> None:
        self._clock, self._leaves, self._made, self._marks = clock, leaves, made, marks
        self._way, self._splitting = way, splitting

    @property
    def outputs(self) -> list[Tensor]:
        """What came out, without its graph."""
        return [value.detach() for value in self._made]

    def backward(self) -> None:
        """Runs the backward between two marks, and frees what it needed; of a split one, the first part."""
        roots, seeds = seeded(self._made)
        self._marks.append(self._clock.mark())
        if self._way is Backward.INPUTS:
            wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        elif roots:
            with nullcontext() if self._splitting is None else self._splitting.input_gradients(0):
                torch.autograd.backward(roots, seeds)
        self._marks.append(self._clock.mark())
        self._leaves, self._made = (), ()

    def weights(self) -> None:
        """Runs the second part of a split backward, between two marks."""
        if self._splitting is not None:
            self._marks.append(self._clock.mark())
            self._splitting.weight_gradients(0)
            self._marks.append(self._clock.mark())

    def note(self, runs: Runs) -> None:
        """Notes the times, once the device has settled."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        took = [self._clock.seconds(start, end) for start, end in pairs]
        columns = {
            Backward.WHOLE: (runs.forward, runs.backward),
            Backward.INPUTS: (runs.again, runs.input_gradient),
            Backward.SPLIT: (runs.split_forward, runs.split_input_gradient, runs.split_weight_gradient),
        }[self._way]
        for column, seconds in zip(columns, took, strict=True):
            column.append(seconds)


def entering(inputs: Iterable[tuple[Tensor, bool]]) -> tuple[list[Tensor], list[Tensor]]:
    """Fresh leaves of these values, each of which takes a gradient or not, and copies of them, which a forward may
    update in place."""
    leaves = [value.detach().requires_grad_(needs) for value, needs in inputs]
    return leaves, [leaf.clone() for leaf in leaves]


def seeded(made: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The results that take a gradient, and a gradient for each."""
    roots = [value for value in made if value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def _really_taken(
    device: torch.device, forward: Callable[[], object], backward: Callable[[], object]
) -> Footprint | None:
    """What both take of memory, kernels' own buffers included, as the allocator counts it; None if it does not say."""
    if device.type == "cuda":
        return _on_cuda(device, forward, backward)

    def both() -> None:
        forward()
        with record_function(BACKWARD_BEGINS):
            backward()

    seen = cpu_allocations(both) if device.type == "cpu" else None
    if seen is None or (BACKWARD_BEGINS, 0) not in seen:
        return None
    held = [0, *accumulate(size for _, size in seen)]
    kept = held[seen.index((BACKWARD_BEGINS, 0))]
    return Footprint(kept, max(held) - kept)


def _on_cuda(device: torch.device, forward: Callable[[], object], backward: Callable[[], object]) -> Footprint:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    forward()
    kept = torch.cuda.memory_allocated(device) - before
    backward()
    return Footprint(kept, torch.cuda.max_memory_allocated(device) - before - kept)
