"""All units of a recording: what they hold, keep, take of memory and do, on fake tensors, and their profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock._base.stages import MODEL_INPUT
from penstock._base.words import in_a_line
from penstock.costs import Profile, UnitCost
from penstock.partition.cut.balance import Candidate, candidates
from penstock.partition.measure.costs import (
    NoStreams,
    UnmeasurableError,
    cut_finely,
    first_of_kind,
    profile_of,
    shared_bytes,
    unit_costs,
)
from penstock.partition.measure.footprint import Footprint, footprint, on_fakes
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.running import Splits
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import build_stage
from penstock.partition.values.memory import meta_bytes

NOTHING = Footprint(0, 0)

Taken = tuple[Footprint, Footprint]
"""Of a unit, and with the loss, if one follows."""


def units_held(
    recording: Recording, model: nn.Module, units: Sequence[Candidate], *, counts: bool = False
) -> tuple[list[Candidate], list[UnitCost], dict[str, Exception]]:
    """The units at which a recording can be cut, and all that they cost but times; with `counts`, what they do, too.
    Last, by name, why it is not known of some what they keep, take and do: they do not run on fake tensors, so that
    counts as nothing.

    Raises:
        UnmeasurableError: the units cannot be run alone.
    """
    kept, split = cut_finely(recording, model, units)
    first, taken, found, unknown = first_of_kind(split), dict[tuple[int, bool], Taken | Exception](), [], {}
    for index, cost in enumerate(unit_costs(kept, split, first)):
        key = first[index], index == split.count - 1
        if key not in taken:
            taken[key] = _while_running(split, index, counts)
        seen = taken[key]
        if isinstance(seen, Exception):
            unknown[cost.name], seen = seen, (NOTHING, NOTHING)
        own, whole = seen
        batch = sum(meta_bytes(i.meta) for i in split.plans[index].inputs if i.source == MODEL_INPUT)
        cost = replace(cost, input_bytes=batch, operations=None if cost.like else own.operations)
        loss = max(whole.kept - own.kept, 0)
        found.append(replace(cost, activation_bytes=own.kept, working_bytes=whole.working, loss_bytes=loss))
    # the last unit runs apart, with the loss: if it is the first of its kind, it ran only so
    seen_first = (taken.get((one, False)) or taken[one, True] for one in first)
    shared = shared_bytes(split, [NOTHING if isinstance(seen, Exception) else seen[0] for seen in seen_first])
    return kept, [replace(cost, shared_bytes=size) for cost, size in zip(found, shared, strict=True)], unknown


def count(
    recording: Recording, model: nn.Module, units: Sequence[Candidate], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Profile:
    """The profile of a recording's units without any times, with the operations of one unit of each kind.

    Weights may be on the meta device. Changes nothing of the model, nor any random generator.

    Raises:
        UnmeasurableError: a unit does not run on fake tensors.
    """
    _, found, unknown = units_held(recording, model, units, counts=True)
    for error in unknown.values():
        raise UnmeasurableError(f"running its units on fake tensors fails ({in_a_line(error)})") from error
    return profile_of(recording, model, found, args, kwargs, 0)


def profiled(
    recording: Recording,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float | None,
    rows: int,
    splits: Splits | None,
) -> Profile:
    """What each unit of a recording costs. Arguments and errors are those of `Partitioner.profile`."""
    units = candidates(recording, model, "flops") or candidates(recording, model, "flops", 2)
    if budget_seconds is None:
        return replace(count(recording, model, units, args, kwargs), rows=rows)
    _, held, unknown = units_held(recording, model, units, counts=True)
    found = measure(recording, model, units, args, kwargs, budget_seconds, splits, memory=True)
    return replace(found, rows=rows, units=_with_memory(found.units, held, counted=not unknown))


def _with_memory(costs: Sequence[UnitCost], held: Sequence[UnitCost], *, counted: bool) -> tuple[UnitCost, ...]:
    """The units with what those of the same names take besides; what was measured counts if it is more. `counted`:
    with what they do, too."""
    known = {unit.name: unit for unit in held}
    found = []
    for unit in costs:
        own = known[unit.name]
        most = {name: max(getattr(unit, name), getattr(own, name)) for name in ("working_bytes", "loss_bytes")}
        more = replace(unit, input_bytes=own.input_bytes, **most)
        found.append(replace(more, operations=own.operations if counted else None))
    return tuple(found)


def _while_running(split: CutRecording, index: int, counts: bool) -> Taken | Exception:
    plan = split.plans[index]
    module, inputs = build_stage(split, plan, index, NoStreams()).module, [value.meta for value in plan.inputs]
    try:
        own = on_fakes(module, inputs, counts=counts)
    except Exception as error:  # a model's own code may raise anything there
        return error
    return own, (footprint(module, inputs, with_loss=True) or own) if index == split.count - 1 else own
