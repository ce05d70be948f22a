"""What units of a recording take of memory besides what they hold and keep, seen on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from penstock.balance import OPTIMIZER_VALUES, Tied, UnitCost
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.alike import kind_of
from penstock.partition.measure.costs import NoStreams, cut_finely
from penstock.partition.measure.footprint import footprint
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import build_stage
from penstock.partition.values.memory import meta_bytes
from penstock.stages import MODEL_INPUT


def units_held(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], list[UnitCost]]:
    """The units at which a recording can be cut, and what they keep and take besides; their times are left out, and so
    is what they hold, except for ties. What does not run on fake tensors counts as nothing.

    Raises:
        UnmeasurableError: the units cannot be run alone.
    """
    kept, split = cut_finely(recording, model, units)
    of_kind: dict[Hashable, UnitCost] = {}
    found = []
    for index, unit in enumerate(kept):
        key = kind_of(split, index), index == len(kept) - 1
        if key not in of_kind:
            of_kind[key] = _while_running(split, index, unit.name)
        batch = sum(meta_bytes(i.meta) for i in split.plans[index].inputs if i.source == MODEL_INPUT)
        found.append(replace(of_kind[key], name=unit.name, input_bytes=batch))
    return kept, [_with_ties(unit, tied) for unit, tied in zip(found, _ties(split), strict=True)]


def with_memory(costs: Sequence[UnitCost], held: Sequence[UnitCost]) -> tuple[UnitCost, ...]:
    """The units with what those of the same names take besides; what was measured counts if it is more."""
    known = {unit.name: unit for unit in held}
    found = []
    for unit in costs:
        own = known[unit.name]
        most = {name: max(getattr(unit, name), getattr(own, name)) for name in ("working_bytes", "loss_bytes")}
        found.append(replace(unit, input_bytes=own.input_bytes, tied=own.tied, **most))
    return tuple(found)


def _while_running(split: CutRecording, index: int, name: str) -> UnitCost:
    plan = split.plans[index]
    module, inputs = build_stage(split, plan, index, NoStreams()).module, [value.meta for value in plan.inputs]
    own = footprint(module, inputs)
    if own is None:
        return UnitCost(name, 0.0, 0.0, 0.0)
    whole = (footprint(module, inputs, with_loss=True) or own) if index == split.count - 1 else own
    loss = max(whole.kept - own.kept, 0)
    return UnitCost(name, 0.0, 0.0, 0.0, own.kept, working_bytes=whole.working, loss_bytes=loss)


def _ties(split: CutRecording) -> list[tuple[Tied, ...]]:
    """The parameters and buffers of each unit that others have too."""
    names = [dict.fromkeys(name for node in plan.run for name in split.held_by(node)) for plan in split.plans]
    count = Counter(name for each in names for name in each)
    return [tuple(_tied(split.recording, name) for name in each if count[name] > 1) for each in names]


def _with_ties(unit: UnitCost, tied: tuple[Tied, ...]) -> UnitCost:
    trained = sum(one.gradient_bytes for one in tied)
    return replace(unit, tied=tied, gradient_bytes=trained, optimizer_bytes=OPTIMIZER_VALUES * trained)


def _tied(recording: Recording, name: str) -> Tied:
    tensor = recording.held[name]
    size = tensor.numel() * tensor.element_size()
    return Tied(name, size, size if tensor.requires_grad else 0)
