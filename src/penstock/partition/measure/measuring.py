"""Measures every unit of a recording: a profile, within a budget of seconds.

Each unit gets what the units before it made of made-up inputs (integers are the example's own). In a round, a
microbatch goes through all units (`in_sequence`); if that does not fit into time or memory, one unit of each kind is
run, in turn. Either way a busy moment of the machine does not fall on one unit alone. A unit that runs again and again
finds its weights and code in the caches; in a step it does not, since other units ran since.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.stages import MODEL_INPUT
from penstock._base.trees import flatten
from penstock._base.words import in_a_line
from penstock.costs import Profile, UnitCost
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.costs import (
    NoStreams,
    UnmeasurableError,
    cut_finely,
    first_of_kind,
    profile_of,
    shared_bytes,
    unit_costs,
    with_times,
)
from penstock.partition.measure.footprint import Footprint
from penstock.partition.measure.running import Backward, Passing, RunningUnit, Splits
from penstock.partition.recording.recording import Recording
from penstock.partition.run.loan import untouched_generators
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import Stage, build_stage
from penstock.partition.state.reach import Reach

BUDGET_SECONDS = 1.0
"""How long measuring may take unless somebody says. One run of each kind of unit is made even if it takes longer."""

MAX_ROUNDS = 21
"""More would not make the medians better."""

ROUNDS = (Backward.WHOLE, Backward.INPUTS, Backward.SPLIT)
"""In turn, so that a busy moment of the machine does not fall on one of them alone."""


def measure(
    recording: Recording,
    model: nn.Module,
    units: Sequence[Candidate],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float = BUDGET_SECONDS,
    splits: Splits | None = None,
    *,
    memory: bool = False,
) -> Profile:
    """The profile of a recording's units. Changes nothing of the model, nor any random generator.

    Args:
        units: the candidates for cuts; those at which no cut is possible join the one before.
        args, kwargs: what was recorded.
        splits: makes what splits backwards, which are then measured too.
        memory: whether to measure what a forward and a backward take, too: runs more, without the clock.

    Raises:
        UnmeasurableError: parameters are on the meta device, or a unit raises.
    """
    if any(tensor.is_meta for tensor in recording.held.values()) or recording.device.type == "meta":
        raise UnmeasurableError("its weights are on the meta device")
    kept, split = cut_finely(recording, model, units)
    held = [tensor for tensor in recording.held.values() if isinstance(tensor, nn.Parameter)]
    written = {id(recording.held[name]) for name in split.updated}
    first_of = first_of_kind(split)

    def made(stage: Stage, inputs: Sequence[Tensor]) -> RunningUnit:
        unsure = {id(p) for p in stage.parameters.values()} if stage.depends_on_values else set()
        return RunningUnit(stage, inputs, held, written | unsure, recording.device, splits)

    def first(stage: Stage, inputs: Sequence[Tensor]) -> RunningUnit:
        running = made(stage, inputs)
        running.first()
        return running

    reach = Reach(model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            given = _made_up(recording, args, kwargs)
            found = _first_runs(split, first_of, {**given}, first)
            runs = _measured(split, given, found, first_of, made, budget_seconds)
            saved = [found[like].saved for like in first_of]
            costs = [
                replace(with_times(cost, found[like].times()), activation_bytes=own.kept, shared_bytes=size)
                for cost, like, own, size in zip(
                    unit_costs(kept, split, first_of), first_of, saved, shared_bytes(split, saved), strict=True
                )
            ]
            if memory:
                costs = _with_taken(costs, [found[like] for like in first_of])
        except Exception as error:
            raise UnmeasurableError(f"running its units fails ({in_a_line(error)})") from error
        finally:
            reach.restore()
    return profile_of(recording, model, costs, args, kwargs, runs)


def _first_runs(
    split: CutRecording, first_of: Sequence[int], values: dict[tuple[int, str], Tensor], run: Make
) -> dict[int, RunningUnit]:
    """Runs one unit of each kind, in order, on what earlier ones made."""
    runs: dict[int, RunningUnit] = {}
    for index, (plan, like) in enumerate(zip(split.plans, first_of, strict=True)):
        if like == index:
            inputs = [values[i.source, i.name] for i in plan.inputs]
            runs[index] = run(build_stage(split, plan, index, NoStreams()), inputs)
        values |= {(index, o.name): made for o, made in zip(plan.outputs, runs[like].outputs, strict=True)}
    return runs


def _with_taken(costs: Sequence[UnitCost], units: Sequence[RunningUnit]) -> list[UnitCost]:
    """The units with what they really take, where that is more than what autograd says that it keeps."""
    taken: dict[tuple[int, bool], Footprint | None] = {}
    late: dict[int, int | None] = {}
    changed = []
    for index, (cost, unit) in enumerate(zip(costs, units, strict=True)):
        is_last = index == len(costs) - 1
        own, whole = (
            taken[key] if (key := (id(unit), loss)) in taken else taken.setdefault(key, unit.taken(with_loss=loss))
            for loss in (False, is_last)
        )
        waits = late[id(unit)] if id(unit) in late else late.setdefault(id(unit), unit.waiting_bytes())
        cost = replace(cost, weight_gradient_bytes=waits)
        changed.append(cost if own is None or whole is None else _at_least(cost, own, whole))
    return changed


def _at_least(cost: UnitCost, own: Footprint, whole: Footprint) -> UnitCost:
    """`own`: of the unit; `whole`: with the loss, if one follows."""
    kept, loss = max(cost.activation_bytes, own.kept), max(whole.kept - own.kept, 0)
    working = max(whole.kept + whole.working - kept - loss, 0)
    return replace(cost, activation_bytes=kept, loss_bytes=loss, working_bytes=working)


def _measured(
    split: CutRecording,
    given: Mapping[tuple[int, str], Tensor],
    kinds: Mapping[int, RunningUnit],
    first_of: Sequence[int],
    made: Make,
    budget_seconds: float,
) -> int:
    """Runs all units again and again until the budget is used up. Returns how often the whole backward was timed."""

    def each_kind(backward: Backward) -> None:
        for unit in kinds.values():
            unit.run(backward)

    until = time.perf_counter() + budget_seconds
    each_kind(Backward.WHOLE)
    alone = sum(unit.runs.seconds for unit in kinds.values())
    through = in_sequence(split, given, kinds, first_of, made, until)
    if through is not None:
        return _rounds(through, until, 0, 0.0)
    return 1 + _rounds(each_kind, until, 1, alone)


def _rounds(one: Round, until: float, first: int, longest: float) -> int:
    """Runs rounds, from that number on, as long as time is left. Returns how often the whole backward was timed."""
    runs = 0
    for number in range(first, MAX_ROUNDS):
        start = time.perf_counter()
        if number and start + longest > until:
            break
        backward = ROUNDS[number % len(ROUNDS)]
        one(backward)
        runs += backward is Backward.WHOLE
        longest = max(longest, time.perf_counter() - start)
    return runs


def _made_up(recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[tuple[int, str], Tensor]:
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


MAX_BYTES = 1 << 30
"""What copies of all weights, their gradients and a microbatch's activations may take. Units of larger models fill the
caches by themselves."""

LEAST_ROUNDS = 4
"""The time must suffice for so many rounds, the first of which is not timed."""

Make = Callable[[Stage, Sequence[Tensor]], RunningUnit]
"""Makes a unit that can be run, with copies of its own."""


Round = Callable[[Backward], None]
"""Runs and times all units, with such backwards."""


def in_sequence(
    split: CutRecording,
    given: Mapping[tuple[int, str], Tensor],
    kinds: Mapping[int, RunningUnit],
    kind_of: Sequence[int],
    made: Make,
    until: float,
) -> Round | None:
    """What runs such a round. It has run once: memory is allocated. None if that takes too much time or memory, or
    raises. Times go to the units of `kinds`, which then have no others.

    Args:
        given: the model's inputs.
        kinds: one unit of each kind, which was timed, by the number of its stage.
        kind_of: for each stage, that number.
        until: when everything has to be done, by `time.perf_counter`.
    """
    like = [kinds[kind] for kind in kind_of]
    left = until - time.perf_counter()
    if LEAST_ROUNDS * sum(unit.runs.seconds for unit in like) > left:
        return None
    if sum(unit.held_bytes + unit.saved.kept for unit in like) > MAX_BYTES:
        return None
    units = []
    for index, kind in enumerate(kind_of):
        if index != kind and time.perf_counter() > until - left / 2:
            return None
        units.append(kinds[kind] if index == kind else _another(split, index, kinds[kind], made))
    runs = [unit.runs for unit in like]

    def round_(backward: Backward) -> None:
        for noted, passing in zip(runs, _through(split, given, units, backward), strict=True):
            passing.note(noted)

    try:
        _through(split, given, units, Backward.WHOLE)
    except Exception:  # on what others made a unit may raise, unlike on what it was first run on
        return None
    for unit in kinds.values():
        unit.runs.clear()
    return round_


def _another(split: CutRecording, index: int, like: RunningUnit, made: Make) -> RunningUnit:
    another = made(build_stage(split, split.plans[index], index, NoStreams()), like.inputs)
    another.learn()
    return another


def _through(
    split: CutRecording, given: Mapping[tuple[int, str], Tensor], units: Sequence[RunningUnit], backward: Backward
) -> list[Passing]:
    """One microbatch through all units and back, then back again for what a split backward has left."""
    values, passings = {**given}, list[Passing]()
    for index, (plan, unit) in enumerate(zip(split.plans, units, strict=True)):
        passings.append(unit.forward([values[i.source, i.name] for i in plan.inputs], backward))
        values |= {(index, o.name): value for o, value in zip(plan.outputs, passings[-1].outputs, strict=True)}
    for passing in reversed(passings):
        passing.backward()
    for passing in reversed(passings):
        passing.weights()
    units[0].clock.settle()
    return passings
