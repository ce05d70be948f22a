"""What units of a recording hold, keep and take of memory, seen on fake tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from penstock.balance import UnitCost
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.alike import kind_of
from penstock.partition.measure.costs import NoStreams, cut_finely, with_tensors
from penstock.partition.measure.footprint import footprint
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.stages.stage import build_stage
from penstock.partition.values.memory import meta_bytes
from penstock.stages import MODEL_INPUT

NOTHING = UnitCost("", 0.0, 0.0, 0.0)


def units_held(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], list[UnitCost], list[str]]:
    """The units at which a recording can be cut, and what they hold, keep and take; their times are left out. Last the
    names of those of which it is not known what they keep and take: they do not run on fake tensors, so it counts as
    nothing.

    Raises:
        UnmeasurableError: the units cannot be run alone.
    """
    kept, split = cut_finely(recording, model, units)
    of_kind: dict[Hashable, UnitCost | None] = {}
    found, unknown = [], []
    for index, unit in enumerate(kept):
        key = kind_of(split, index), index == len(kept) - 1
        if key not in of_kind:
            of_kind[key] = _while_running(split, index)
        seen = of_kind[key]
        if seen is None:
            unknown.append(unit.name)
        batch = sum(meta_bytes(i.meta) for i in split.plans[index].inputs if i.source == MODEL_INPUT)
        found.append(replace(seen or NOTHING, name=unit.name, input_bytes=batch))
    return kept, with_tensors(found, split), unknown


def with_memory(costs: Sequence[UnitCost], held: Sequence[UnitCost]) -> tuple[UnitCost, ...]:
    """The units with what those of the same names take besides; what was measured counts if it is more."""
    known = {unit.name: unit for unit in held}
    found = []
    for unit in costs:
        own = known[unit.name]
        most = {name: max(getattr(unit, name), getattr(own, name)) for name in ("working_bytes", "loss_bytes")}
        found.append(replace(unit, input_bytes=own.input_bytes, **most))
    return tuple(found)


def _while_running(split: CutRecording, index: int) -> UnitCost | None:
    plan = split.plans[index]
    module, inputs = build_stage(split, plan, index, NoStreams()).module, [value.meta for value in plan.inputs]
    own = footprint(module, inputs)
    if own is None:
        return None
    whole = (footprint(module, inputs, with_loss=True) or own) if index == split.count - 1 else own
    loss = max(whole.kept - own.kept, 0)
    return replace(NOTHING, activation_bytes=own.kept, working_bytes=whole.working, loss_bytes=loss)
