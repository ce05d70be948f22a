"""Runs all units as a microbatch goes through them: forwards in order, then backwards in reverse order.

A unit that runs again and again finds its weights and code in the caches. In a step it does not: other units ran since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from penstock.partition.measure.costs import NoStreams
from penstock.partition.measure.running import Backward, Passing, RunningUnit
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import Stage, build_stage

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
