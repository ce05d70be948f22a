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
from penstock.partition.measure.clock import settle
from penstock.partition.measure.running import Backward, RunningUnit, Splits
from penstock.partition.measure.units import Footprints, Units, UnmeasurableError
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
    """Measure the cost of each unit of a recording. Change nothing of the model, nor any random generator.

    Args:
        places: the candidates for cuts; those at which no cut is possible join the one before.
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
    units = Units.of(recording, model, places)
    seen = units.footprints(counts=memory)
    if budget_seconds is None:
        for error in (each for each in seen.values() if isinstance(each, Exception)):
            raise UnmeasurableError(f"running its units on fake tensors fails ({in_a_line(error)})") from error
        return units.profile(units.costs(seen), args, kwargs, 0)
    reach = Reach(model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            measuring = _Measuring(units, seen, _made_up(recording, args, kwargs), splits)
            runs = measuring.rounds(budget_seconds)
            return units.profile(measuring.measured(memory=memory), args, kwargs, runs)
        except Exception as error:
            raise UnmeasurableError(f"running its units fails ({in_a_line(error)})") from error
        finally:
            reach.restore()


def _made_up(recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """Return the model's inputs. Fractions, which a recording does not know, are drawn: garbage may take longer to
    compute."""
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
        seen: what they take on fake tensors.
        given: the model's inputs.
    """

    def __init__(self, units: Units, seen: Footprints, given: Values, splits: Splits | None) -> None:
        self._units, self._given, self._splits = units, given, splits
        self._plans = units.split.plans
        self._kinds: dict[int, RunningUnit] = {}  # one unit of each kind, by its number
        values, made = {**given}, dict[int, Sequence[Tensor]]()
        for index, first in enumerate(units.first_of_kind):
            if first == index:
                inputs = [values[i.source, i.name] for i in self._plans[index].inputs]
                self._kinds[index] = self._unit(index, inputs)
                made[index] = self._kinds[index].begin()
            values |= self._passed(index, made[first])
        unknown = {first: self._kinds[first].saved for first, own in seen.items() if isinstance(own, Exception)}
        self._costs = units.costs({**seen, **unknown})
        if unknown:
            self._costs = [replace(cost, operations=None) for cost in self._costs]

    def _unit(self, index: int, inputs: Sequence[Tensor]) -> RunningUnit:
        """Make a unit. Parameters that a forward updates are copied wherever they are."""
        stage, held = self._units.stage(index), self._units.split.recording.held
        copied = {*map(id, stage.parameters.values())}  # all that it may update, if that depends on values
        copied |= {id(held[name]) for name in self._units.split.updated}
        shared = [p for p in held.values() if isinstance(p, nn.Parameter) and id(p) not in copied]
        return RunningUnit(stage, inputs, shared, self._splits)

    def _passed(self, index: int, outputs: Sequence[Tensor]) -> Values:
        return dict(zip(((index, o.name) for o in self._plans[index].outputs), outputs, strict=True))

    def rounds(self, budget_seconds: float) -> int:
        """Run all units until the budget is used up. Return how often the whole backward was timed."""
        until = time.perf_counter() + budget_seconds
        for unit in self._kinds.values():
            unit.run()
        number, longest = 1, sum(unit.seconds for unit in self._kinds.values())
        sequence = self._in_sequence(until)
        if sequence is not None:
            number, longest = 0, 0.0
        while number < MAX_ROUNDS:
            start, backward = time.perf_counter(), ROUNDS[number % len(ROUNDS)]
            if number and start + longest > until:
                break
            if sequence is not None:
                self._through(sequence, backward)
            else:
                for unit in self._kinds.values():
                    unit.run(backward)
            number, longest = number + 1, max(longest, time.perf_counter() - start)
        return -(-number // len(ROUNDS))

    def _in_sequence(self, until: float) -> list[RunningUnit] | None:
        """Run a microbatch through all units, so that memory is allocated, and return them; alike ones share their
        times, of which there are none yet. None if that takes too much time or memory, or raises. `until`: when
        everything has to be done, by `time.perf_counter`."""
        alike = [self._kinds[first] for first in self._units.first_of_kind]
        left = until - time.perf_counter()
        sizes = (cost.parameter_bytes + cost.gradient_bytes + cost.activation_bytes for cost in self._costs)
        if LEAST_ROUNDS * sum(unit.seconds for unit in alike) > left or sum(sizes) > MAX_BYTES:
            return None
        found: list[RunningUnit] = []
        for index, like in enumerate(alike):
            if like not in found:
                found.append(like)
                continue
            if time.perf_counter() > until - left / 2:
                return None
            found.append(self._unit(index, like.inputs))
            found[-1].begin()
            found[-1].runs = like.runs
        try:
            self._through(found, Backward.WHOLE)
        except Exception:  # on what others made a unit may raise, unlike on what it was first run on
            return None
        for unit in alike:
            unit.runs.clear()
        return found

    def _through(self, units: Sequence[RunningUnit], backward: Backward) -> None:
        """Run one microbatch through all units and back, then back again for what a split backward has left."""
        values, steps = {**self._given}, []
        for index, unit in enumerate(units):
            steps.append(unit.step([values[i.source, i.name] for i in self._plans[index].inputs], backward))
            values |= self._passed(index, next(steps[-1]))
        for step in (*reversed(steps), *reversed(steps)):
            next(step)
        settle(self._units.split.recording.device)
        for step in steps:
            next(step, None)

    def measured(self, *, memory: bool) -> list[UnitCost]:
        """Return the costs with times. `memory`: and with what units really take, kernels' own buffers included, where
        the allocator reports it: they run once more, without the clock."""
        firsts = self._units.first_of_kind
        found = [self._kinds[first].timed(cost) for cost, first in zip(self._costs, firsts, strict=True)]
        if not memory:
            return found
        taken = {first: unit.taken() for first, unit in self._kinds.items()}
        waiting = {first: unit.waiting_bytes() for first, unit in self._kinds.items()}
        for index, (cost, first) in enumerate(zip(found, firsts, strict=True)):
            own = whole = taken[first]
            if index == len(firsts) - 1:
                whole = self._kinds[first].taken(with_loss=True)
            if own is not None and whole is not None:
                kept, loss = max(self._kinds[first].saved.kept, own.kept), max(whole.kept - own.kept, 0)
                working = max(cost.working_bytes, whole.kept + whole.working - kept - loss)
                cost = replace(
                    cost, activation_bytes=kept, working_bytes=working, loss_bytes=max(cost.loss_bytes, loss)
                )
            found[index] = replace(cost, weight_gradient_bytes=waiting[first])
        return found
