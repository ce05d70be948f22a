"""Cuts that name several modules, joined by "+": the stage begins with all of them, and what needs none of them runs
before.

A cut at one module means "this one and all that the forward runs later". Where modules run in another order than in the
forward, that does not say where a stage begins: of two towers, it may begin in the middle of both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.cut.any_order import order_between, why_fixed
from penstock.partition.cut.balance import candidates, cut_positions
from penstock.partition.recording.recording import Recording

JOINT = "+"
"""Between the modules. After a single one: the stage begins there, but not with all that runs later."""


def is_joint(model: nn.Module, cut: str) -> bool:
    """Whether a cut names several modules. (A module's own name may have the sign, too.)"""
    return JOINT in cut and cut not in dict(model.named_modules())


def modules_in(model: nn.Module, cut: str) -> tuple[str, ...]:
    """The names of the modules that a cut names."""
    return tuple(filter(None, cut.split(JOINT))) if is_joint(model, cut) else (cut,)


def named_cuts(recording: Recording, model: nn.Module, stage_of: Mapping[str, int]) -> tuple[str, ...]:
    """The cuts for these stages of units, so that `stages_at` finds the same stages."""
    every, known = [*_units(recording, model).values()], 0
    stages = [known := stage_of.get(name, known) for name in every]
    order = order_between(recording, model, every)
    return tuple(_named(every, [one >= stage for one in stages], order) for stage in range(1, max(stages) + 1))


def _named(units: Sequence[str], after: Sequence[bool], order: Collection[tuple[int, int]]) -> str:
    """A cut with these units after it: at those that need no other one of them, or follow one that is before it."""
    first = after.index(True)
    if all(after[first:]):
        return units[first]
    waits = {b for a, b in order if after[a]}
    begins = [k for k, later in enumerate(after) if later and (k not in waits or k == 0 or not after[k - 1])]
    return JOINT.join(units[k] for k in begins) + (JOINT if len(begins) == 1 else "")


def stages_at(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> dict[str, int]:
    """The stage of each unit if the model is cut at these, some of which name several modules.

    Raises PartitionError if a name gives no cut, if calls must not change places, or if a later cut has something
    after it that an earlier one has not.
    """
    if why := why_fixed(recording, model):
        joint = next(cut for cut in cuts if is_joint(model, cut))
        raise PartitionError(f"cuts: {joint!r} needs another order of modules than the forward's, but {why}")
    at = {name: cut_positions(recording, model, [name])[0] for cut in cuts for name in modules_in(model, cut)}
    by_position = {position: name for name, position in at.items()} | _units(recording, model)
    positions = sorted(by_position)
    units = [by_position[position] for position in positions]
    order = order_between(recording, model, units)
    stages = [0] * len(units)
    for stage, cut in enumerate(cuts, 1):
        begins = [positions.index(at[name]) for name in modules_in(model, cut)]
        after = _after(begins, order) if is_joint(model, cut) else {*range(begins[0], len(units))}
        if odd := [k for k in after if stages[k] < stage - 1]:
            raise PartitionError(
                f"cuts: {cut!r} comes after {cuts[stage - 2]!r} in the list, but {units[min(odd)]!r} follows only the "
                "later one. Name each stage's first modules, in the order of the stages"
            )
        for k in after:
            stages[k] = stage
    return dict(zip(units, stages, strict=True))


def _units(recording: Recording, model: nn.Module) -> dict[int, str]:
    """Where the model can be cut, by the position in the recording."""
    return {unit.position: unit.name for unit in candidates(recording, model, "flops")}


def _after(begins: Collection[int], order: Collection[tuple[int, int]]) -> set[int]:
    """These, and all that must not run before one of them."""
    found, new = set[int](), {*begins}
    while new:
        found |= new
        new = {b for a, b in order if a in new} - found
    return found
