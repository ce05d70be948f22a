"""Finds the modules to open: for `split_inside=`, for cuts that lie inside, and for balance."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from penstock._base.errors import PartitionError
from penstock.costs import Profile
from penstock.partition.cut.balance import Weighed, candidates, even_starts, heaviest_stage, is_mark, place_of
from penstock.partition.recording.recording import Recording
from penstock.partition.units.chain import unwrapped
from penstock.partition.units.units import LISTS, Opening, Unit, canonical_names, find_units, repeats, resolve

WORTHWHILE = 0.95
"""Modules are opened if that shrinks the largest stage below this fraction of its size."""


def opening_for(
    model: nn.Module, leaves: Sequence[str], opens: Sequence[str], cuts: Sequence[str] | None, stages: int
) -> Opening:
    """Return what to open before anything is recorded. Raise PartitionError for names that cannot be opened.

    If cuts have to be found, the number of repeated blocks stands in for the work, which is not known yet.
    """
    names = canonical_names(model)
    whole = {names[id(resolve(model, name, "leaf_modules"))] for name in leaves}
    asked = {names[id(resolve(model, name, "split_inside"))] for name in opens}
    inside = {place_of(model, cut).path for cut in cuts or ()}
    for argument, wanted in (("split_inside", asked), ("cuts", {name.rpartition(".")[0] for name in inside})):
        for name in wanted:
            leaf = next((leaf for leaf in whole if f"{name}.".startswith(f"{leaf}.")), None)
            if leaf is not None:
                raise PartitionError(
                    f"{argument}: {name!r} is to be opened, but leaf_modules=[{leaf!r}] says that it runs as a whole"
                )
    found = Opening(frozenset(n for name in asked for n in (*_enclosing(name), name)))
    units = {unit.name for unit in find_units(model, leaves, apart=found.names).values()}
    within = {n for name in inside for n in _enclosing(name)}
    found = replace(
        found, for_cuts=frozenset(n for n in within if any(f"{n}.".startswith(f"{unit}.") for unit in units))
    )
    while cuts is None:
        order = list(find_units(model, leaves, apart=found.names).values())
        weights = [blocks_in(unit.module) if unit.block else 0 for unit in order]
        worth = frozenset(_worth_opening(order, weights, stages, whole))
        if not worth:
            break
        found = replace(found, tried=found.tried | worth)
    return found


def opening_of(model: nn.Module, opening: Opening, profile: Profile) -> Opening:
    """Extend the opening by what was opened when the profile was made, so that the same units are there."""
    there = {name for name, _ in model.named_modules()}
    return replace(opening, tried=opening.tried | (there.intersection(profile.opened) - opening.names))


def more_to_open(
    recording: Recording, model: nn.Module, leaves: Sequence[str], stages: int, balance: Weighed
) -> Opening:
    """Return what to open now that weights are known: the recording's own opening if nothing else is worth opening."""
    opening = recording.opening
    found_units = find_units(model, leaves, recording.grain, opening.names).values()
    units = {unwrapped(unit.name): unit for unit in found_units}
    found = candidates(recording, model, balance)
    if sum(is_mark(one.name) for one in found) >= stages - 1:
        return opening
    modules = dict(model.named_modules())
    order = [units.get(one.name) or Unit(one.name, modules.get(one.name, nn.Identity()), block=False) for one in found]
    names = canonical_names(model)
    whole = opening.whole | {names[id(resolve(model, name, "leaf_modules"))] for name in leaves}
    worth = _worth_opening(order, [one.weight for one in found], stages, whole)
    return replace(opening, tried=opening.tried | frozenset(worth))


def _worth_opening(units: Sequence[Unit], weights: Sequence[int], stages: int, whole: Collection[str]) -> Iterator[str]:
    """Yield the modules inside which the best cuts would fall, if opening them is worthwhile. Leave out `whole`.

    Assumes that all repeated blocks of a module weigh the same.
    """
    counts = [blocks_in(unit.module) if unit.name not in whole and _may_open(unit.module) else 1 for unit in units]
    if max(counts, default=1) == 1 or stages == 1:
        return
    pieces = [weight // count for weight, count in zip(weights, counts, strict=True) for _ in range(count)]
    if stages > len(pieces):
        return
    starts = even_starts(pieces, stages)
    whole_units = heaviest_stage(weights, even_starts(weights, stages)) if stages <= len(units) else math.inf
    if heaviest_stage(pieces, starts) > WORTHWHILE * whole_units:
        return
    ends = list(accumulate(counts))
    for unit, end, count in zip(units, ends, counts, strict=True):
        if any(end - count < start < end for start in starts):
            yield unit.name


def _may_open(module: nn.Module) -> bool:
    """Whether a module can be opened: nothing in it has hooks that would run during recording and never again."""
    lists = (child for child in module.children() if isinstance(child, (*LISTS, nn.Sequential)))
    return not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (module, *lists))


def blocks_in(module: nn.Module) -> int:
    """Return how many repeated blocks a module can be opened into, down to those that contain none; 1 if it contains
    none."""
    total = 0
    for child in module.children():
        inner = sum(blocks_in(block) for block in child.children()) if repeats(child) else blocks_in(child)
        total += inner if inner > 1 else 0
    return max(1, total)


def _enclosing(name: str) -> list[str]:
    """Return the names of the modules around a module, except the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
