"""Measures every unit of a recording: a profile, within a budget of seconds.

Each unit gets what the units before it made of made-up inputs (integers are the example's own). In a round, a
microbatch goes through all units (`_build_sequence`); if that does not fit into time or memory, one unit of each kind
is run, in turn. Either way a busy moment of the machine does not fall on one unit alone. A unit that runs again and
again finds its weights and code in the caches; in a step it does not, since other units ran since.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.formatting import one_line
from penstock._base.pytree import flatten
from penstock._base.stages import MODEL_INPUT
from penstock.costs import Profile, UnitCost
from penstock.partition.cut.candidates import Candidate
from penstock.partition.measure.clock import synchronize
from penstock.partition.measure.pieces import Footprints, Pieces, UnmeasurableError
from penstock.partition.measure.running import Backward, MakeSplitter, UnitRunner
from penstock.partition.record.fakes import untouched_generators
from penstock.partition.recording import Recording
from penstock.partition.state.reachable import Reach

BUDGET_SECONDS = 0.5
"""The default of `budget_seconds`. One run of each kind of unit is made even if it takes longer."""

MAX_ROUNDS = 21
"""More would not make the medians better."""

ROUNDS = (Backward.WHOLE, Backward.INPUTS, Backward.SPLIT)
"""In turn, so that a busy moment of the machine does not fall on one of them alone."""

MAX_BYTES = 1 << 30
"""What copies of all weights, their gradients and a microbatch's activations may take. Pieces of larger models fill the
caches by themselves."""

MIN_ROUNDS = 4
"""The time must suffice for so many rounds, the first of which is not timed."""

Values = dict[tuple[int, str], Tensor]
"""What units pass on, by the unit that made it and its name."""


def measure(
    recording: Recording,
    model: nn.Module,
    candidates: Sequence[Candidate],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float | None = BUDGET_SECONDS,
    splits: MakeSplitter | None = None,
    *,
    memory: bool = False,
) -> Profile:
    """Measure the cost of each unit of a recording. Change nothing of the model, nor any random generator.

    Args:
        candidates: for cuts; those at which no cut is possible join the one before.
        args, kwargs: what was recorded.
        budget_seconds: how long to measure; None: nothing is run, so that weights may be on the meta device.
        splits: makes what splits backwards, which are then measured too.
        memory: whether to find out what units really take of memory, and what one of each kind does.

    Raises:
        UnmeasurableError: parameters are on the meta device, or a unit raises.
    """
    on_meta = any(tensor.is_meta for tensor in recording.held.values()) or recording.device.type == "meta"
    if budget_seconds is not None and on_meta:
        raise UnmeasurableError("its weights are on the meta device")
    units = Pieces.from_recording(recording, model, candidates)
    footprints = units.footprints(counts=memory)
    if budget_seconds is None:
        for error in (result for result in footprints.values() if isinstance(result, Exception)):
            raise UnmeasurableError(f"running its units on fake tensors fails ({one_line(error)})") from error
        return units.profile(units.costs(footprints), args, kwargs, 0)
    reach = Reach(model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            measuring = _Measurement(units, footprints, _make_inputs(recording, args, kwargs), splits)
            runs = measuring.run_rounds(budget_seconds)
            return units.profile(measuring.measured_costs(memory=memory), args, kwargs, runs)
        except Exception as error:
            raise UnmeasurableError(f"running its units fails ({one_line(error)})") from error
        finally:
            reach.restore()


def _make_inputs(recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """Return the model's inputs. Fractions, which a recording does not know, are drawn: garbage may take longer to
    compute."""
    leaves = flatten((tuple(args), dict(kwargs))).leaves
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for node, position in recording.inputs.items():
        value = leaves[position]
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            drawn = torch.empty_like(value, requires_grad=False)
            value = drawn.copy_(torch.randn(value.shape, generator=generator))
        inputs[MODEL_INPUT, node.name] = value
    return inputs


class _Measurement:
    """The units of a recording while they are measured. Making it runs one of each kind, on what earlier ones made.

    Args:
        footprints: what they take on fake tensors.
    """

    def __init__(
        self, units: Pieces, footprints: Footprints, model_inputs: Values, splits: MakeSplitter | None
    ) -> None:
        self._units, self._model_inputs, self._splits = units, model_inputs, splits
        self._plans = units.split.plans
        self._runners: dict[int, UnitRunner] = {}  # one unit of each kind, by its number
        values, outputs = {**model_inputs}, dict[int, Sequence[Tensor]]()
        for index, first in enumerate(units.first_of_kind):
            if first == index:
                inputs = [values[i.source, i.name] for i in self._plans[index].inputs]
                self._runners[index] = self._make_unit(index, inputs)
                outputs[index] = self._runners[index].begin()
            values |= self._name_outputs(index, outputs[first])
        saved = {first: self._runners[first].saved for first, size in footprints.items() if isinstance(size, Exception)}
        self._costs = units.costs({**footprints, **saved})
        if saved:
            self._costs = [replace(cost, operations=None) for cost in self._costs]

    def _make_unit(self, index: int, inputs: Sequence[Tensor]) -> UnitRunner:
        """Make a unit. Parameters that a forward updates are copied wherever they are."""
        stage, tensors = self._units.stage(index), self._units.split.recording.held
        copied = {*map(id, stage.parameters.values())}  # all that it may update, if that depends on values
        copied |= {id(tensors[name]) for name in self._units.split.updated}
        shared = [p for p in tensors.values() if isinstance(p, nn.Parameter) and id(p) not in copied]
        return UnitRunner(stage, inputs, shared, self._splits)

    def _name_outputs(self, index: int, outputs: Sequence[Tensor]) -> Values:
        return dict(zip(((index, o.name) for o in self._plans[index].outputs), outputs, strict=True))

    def run_rounds(self, budget_seconds: float) -> int:
        """Run all units until the budget is used up. Return how often the whole backward was timed."""
        deadline = time.perf_counter() + budget_seconds
        for unit in self._runners.values():
            unit.run()
        longest, sequence = sum(unit.seconds for unit in self._runners.values()), self._build_sequence(deadline)
        number, longest = (1, longest) if sequence is None else (0, 0.0)
        while number < MAX_ROUNDS:
            start, backward = time.perf_counter(), ROUNDS[number % len(ROUNDS)]
            if number and start + longest > deadline:
                break
            if sequence is not None:
                self._run_sequence(sequence, backward)
            else:
                for unit in self._runners.values():
                    unit.run(backward)
            number, longest = number + 1, max(longest, time.perf_counter() - start)
        return -(-number // len(ROUNDS))

    def _build_sequence(self, deadline: float) -> list[UnitRunner] | None:
        """Run a microbatch through all units, so that memory is allocated, and return them; alike ones share their
        times, of which there are none yet. None if that takes too much time or memory, or raises. `deadline`:
        when everything has to be done, by `time.perf_counter`."""
        units = [self._runners[first] for first in self._units.first_of_kind]
        seconds_left = deadline - time.perf_counter()
        sizes = (cost.parameter_bytes + cost.gradient_bytes + cost.activation_bytes for cost in self._costs)
        if MIN_ROUNDS * sum(unit.seconds for unit in units) > seconds_left or sum(sizes) > MAX_BYTES:
            return None
        sequence: list[UnitRunner] = []
        for index, first_like in enumerate(units):
            if first_like not in sequence:
                sequence.append(first_like)
                continue
            if time.perf_counter() > deadline - seconds_left / 2:
                return None
            sequence.append(self._make_unit(index, first_like.inputs))
            sequence[-1].begin()
            sequence[-1].runs = first_like.runs
        try:
            self._run_sequence(sequence, Backward.WHOLE)
        except Exception:  # on what others made a unit may raise, unlike on what it was first run on
            return None
        for unit in units:
            unit.runs.clear()
        return sequence

    def _run_sequence(self, units: Sequence[UnitRunner], backward: Backward) -> None:
        """Run one microbatch through all units and back, then back again for what a split backward has left."""
        values, steps = {**self._model_inputs}, []
        for index, unit in enumerate(units):
            steps.append(unit.step([values[i.source, i.name] for i in self._plans[index].inputs], backward))
            values |= self._name_outputs(index, next(steps[-1]))
        for step in (*reversed(steps), *reversed(steps)):
            next(step)
        synchronize(self._units.split.recording.device)
        for step in steps:
            next(step, None)

    def measured_costs(self, *, memory: bool) -> list[UnitCost]:
        """Return the costs with times. `memory`: and with what units really take, kernels' own buffers included, where
        the allocator reports it: they run once more, without the clock."""
        firsts = self._units.first_of_kind
        costs = [self._runners[first].timed(cost) for cost, first in zip(self._costs, firsts, strict=True)]
        if not memory:
            return costs
        real_memory = {first: unit.real_memory() for first, unit in self._runners.items()}
        deferred_bytes = {first: unit.deferred_bytes() for first, unit in self._runners.items()}
        for index, (cost, first) in enumerate(zip(costs, firsts, strict=True)):
            alone = with_loss = real_memory[first]
            if index == len(firsts) - 1:
                with_loss = self._runners[first].real_memory(with_loss=True)
            if alone is not None and with_loss is not None:
                kept, loss = (max(self._runners[first].saved.kept, alone.kept), max(with_loss.kept - alone.kept, 0))
                working = max(cost.working_bytes, with_loss.kept + with_loss.working - kept - loss)
                cost = replace(
                    cost, activation_bytes=kept, working_bytes=working, loss_bytes=max(cost.loss_bytes, loss)
                )
            costs[index] = replace(cost, weight_gradient_bytes=deferred_bytes[first])
        return costs
