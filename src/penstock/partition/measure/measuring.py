"""Measures every unit of a recording: a profile, within a budget of seconds.

Each unit gets what the units before it made of made-up inputs (integers are the example's own). In a round, a
microbatch goes through all units (`_in_sequence`); if that does not fit into time or memory, one unit of each kind is
run, in turn. Either way a busy moment of the machine does not fall on one unit alone. A unit that runs again and again
finds its weights and code in the caches; in a step it does not, since other units ran since.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.stages import MODEL_INPUT
from penstock._base.trees import flatten
from penstock._base.words import in_a_line
from penstock.costs import Profile, UnitCost
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.running import Backward, RunningUnit, Splits
from penstock.partition.measure.units import Units, UnmeasurableError
from penstock.partition.recording.recording import Recording
from penstock.partition.run.loan import untouched_generators
from penstock.partition.state.reach import Reach

BUDGET_SECONDS = 1.0
"""How long measuring may take unless somebody says. One run of each kind of unit is made even if it takes longer."""

MAX_ROUNDS = 21
"""More would not make the medians better."""

ROUNDS = (Backward.WHOLE, Backward.INPUTS, Backward.SPLIT)
"""In turn, so that a busy moment of the machine does not fall on one of them alone."""

MAX_BYTES = 1 << 30
"""What copies of all weights, their gradients and a microbatch's activations may take. Units of larger models fill the
caches by themselves."""

LEAST_ROUNDS = 4
"""The time must suffice for so many rounds, the first of which is not timed."""

Values = dict[tuple[int, str], Tensor]
"""What units pass on, by the unit that made it and its name."""


def measure(
    recording: Recording,
    model: nn.Module,
    places: Sequence[Candidate],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float | None = BUDGET_SECONDS,
    splits: Splits | None = None,
    *,
    memory: bool = False,
) -> Profile:
    """What each unit of a recording costs. Changes nothing of the model, nor any random generator.

    Args:
        places: the candidates for cuts; those at which no cut is possible join the one before.
        args, kwargs: what was recorded.
        budget_seconds: how long to measure; None: nothing is run, so that weights may be on the meta device.
        splits: makes what splits backwards, which are then measured too.
        memory: whether to find out what units take of memory, and what one of each kind does.

    Raises:
        UnmeasurableError: parameters are on the meta device, or a unit raises.
    """
    units, runs = Units.of(recording, model, places), 0
    costs, unknown = units.with_memory(counts=True) if memory else (units.costs, {})
    if budget_seconds is not None:
        costs, runs = _timed(units, costs, args, kwargs, budget_seconds, splits, memory=memory)
        if unknown:
            costs = [replace(cost, operations=None) for cost in costs]
    elif unknown:
        error = next(iter(unknown.values()))
        raise UnmeasurableError(f"running its units on fake tensors fails ({in_a_line(error)})") from error
    return units.profile(costs, args, kwargs, runs)


def _timed(
    units: Units,
    costs: Sequence[UnitCost],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float,
    splits: Splits | None,
    *,
    memory: bool,
) -> tuple[list[UnitCost], int]:
    """The costs with times, and how often the whole backward was timed. `memory`: what forwards and backwards really
    take counts, too: they run once more, without the clock."""
    recording = units.split.recording
    if any(tensor.is_meta for tensor in recording.held.values()) or recording.device.type == "meta":
        raise UnmeasurableError("its weights are on the meta device")
    reach = Reach(units.model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            measuring = _Measuring(units, _made_up(recording, args, kwargs), splits)
            runs = measuring.rounds(budget_seconds)
            found = [measuring.kinds[first].timed(cost) for cost, first in zip(costs, units.first_of_kind, strict=True)]
            shared = units.shared_bytes({first: unit.saved for first, unit in measuring.kinds.items()})
            found = [replace(cost, shared_bytes=size) for cost, size in zip(found, shared, strict=True)]
            return measuring.with_memory(found) if memory else found, runs
        except Exception as error:
            raise UnmeasurableError(f"running its units fails ({in_a_line(error)})") from error
        finally:
            reach.restore()


def _made_up(recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """The model's inputs. Fractions, which a recording does not know, are drawn: garbage may take longer to compute."""
    leaves = flatten((tuple(args), dict(kwargs))).leaves
    generator = torch.Generator().manual_seed(0)
    found = {}
    for node, place in recording.inputs.items():
        value = leaves[place]
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            made = torch.empty_like(value, requires_grad=False)
            value = made.copy_(torch.randn(value.shape, generator=generator))
        found[MODEL_INPUT, node.name] = value
    return found


class _Measuring:
    """The units of a recording while they are measured. To make it runs one of each kind, on what earlier ones made.

    Args:
        given: the model's inputs.

    Attributes:
        kinds: one unit of each kind, by its number.
    """

    def __init__(self, units: Units, given: Values, splits: Splits | None) -> None:
        self._units, self._given, self._splits = units, given, splits
        recording = units.split.recording
        self._held = [tensor for tensor in recording.held.values() if isinstance(tensor, nn.Parameter)]
        self._written = {id(recording.held[name]) for name in units.split.updated}
        self.kinds: dict[int, RunningUnit] = {}
        values = {**given}
        for index, (plan, first) in enumerate(zip(units.split.plans, units.first_of_kind, strict=True)):
            if first == index:
                self.kinds[index] = self._unit(index, [values[i.source, i.name] for i in plan.inputs])
                self.kinds[index].first()
            values |= zip(((index, o.name) for o in plan.outputs), self.kinds[first].outputs, strict=True)

    def _unit(self, index: int, inputs: Sequence[Tensor]) -> RunningUnit:
        stage = self._units.stage(index)
        unsure = {id(p) for p in stage.parameters.values()} if stage.depends_on_values else set()
        device = self._units.split.recording.device
        return RunningUnit(stage, inputs, self._held, self._written | unsure, device, self._splits)

    def rounds(self, budget_seconds: float) -> int:
        """Runs all units until the budget is used up. Returns how often the whole backward was timed."""
        until = time.perf_counter() + budget_seconds
        for unit in self.kinds.values():
            unit.run()
        number, longest = 1, sum(unit.seconds for unit in self.kinds.values())
        sequence = self._in_sequence(until)
        if sequence is not None:
            number, longest = 0, 0.0
        while number < MAX_ROUNDS:
            start = time.perf_counter()
            if number and start + longest > until:
                break
            backward = ROUNDS[number % len(ROUNDS)]
            if sequence is not None:
                self._through(sequence, backward)
            else:
                for unit in self.kinds.values():
                    unit.run(backward)
            number, longest = number + 1, max(longest, time.perf_counter() - start)
        return -(-number // len(ROUNDS))

    def _in_sequence(self, until: float) -> list[RunningUnit] | None:
        """All units, once a microbatch has gone through them: memory is allocated. Alike ones note their times
        together, and have noted none. None if that takes too much time or memory, or raises; `until`: when everything
        has to be done, by `time.perf_counter`.
        """
        first_of_kind = self._units.first_of_kind
        alike = [self.kinds[first] for first in first_of_kind]
        left = until - time.perf_counter()
        if LEAST_ROUNDS * sum(unit.seconds for unit in alike) > left:
            return None
        if sum(unit.held_bytes + unit.saved.kept for unit in alike) > MAX_BYTES:
            return None
        found = []
        for index, (first, unit) in enumerate(zip(first_of_kind, alike, strict=True)):
            if index != first:
                if time.perf_counter() > until - left / 2:
                    return None
                like, unit = unit, self._unit(index, unit.inputs)
                unit.learn()
                unit.runs = like.runs
            found.append(unit)
        try:
            self._through(found, Backward.WHOLE)
        except Exception:  # on what others made a unit may raise, unlike on what it was first run on
            return None
        for unit in self.kinds.values():
            unit.runs.clear()
        return found

    def _through(self, units: Sequence[RunningUnit], backward: Backward) -> None:
        """One microbatch through all units and back, then back again for what a split backward has left."""
        values, steps = {**self._given}, []
        for index, (plan, unit) in enumerate(zip(self._units.split.plans, units, strict=True)):
            steps.append(unit.step([values[i.source, i.name] for i in plan.inputs], backward))
            values |= zip(((index, o.name) for o in plan.outputs), next(steps[-1]), strict=True)
        for step in (*reversed(steps), *reversed(steps)):
            next(step)
        units[0].clock.settle()
        for step in steps:
            next(step, None)

    def with_memory(self, costs: Sequence[UnitCost]) -> list[UnitCost]:
        """The costs with what units really take, where that is more than what autograd keeps, or fake tensors show."""

        own = {first: unit.taken() for first, unit in self.kinds.items()}
        waiting = {first: unit.waiting_bytes() for first, unit in self.kinds.items()}
        with_loss = self.kinds[self._units.first_of_kind[-1]].taken(with_loss=True)
        found = []
        for index, (cost, first) in enumerate(zip(costs, self._units.first_of_kind, strict=True)):
            kept, alone = cost.activation_bytes, own[first]
            whole = with_loss if index == len(costs) - 1 else alone
            if alone is not None and whole is not None:
                kept, loss = max(kept, alone.kept), max(whole.kept - alone.kept, 0)
                working = max(whole.kept + whole.working - kept - loss, 0)
                more = max(cost.working_bytes, working), max(cost.loss_bytes, loss)
                cost = replace(cost, working_bytes=more[0], loss_bytes=more[1])
            found.append(replace(cost, activation_bytes=kept, weight_gradient_bytes=waiting[first]))
        return found
