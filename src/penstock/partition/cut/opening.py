"""Finds the modules to open for `split_inside=`, for cuts that lie inside, and for balance, in addition to those that
`units.py` opens by its rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from penstock._base.errors import PartitionError
from penstock.costs import Profile
from penstock.partition.cut.candidates import Measure, candidates, even_starts, heaviest_stage
from penstock.partition.cut.names import find_call, is_mark
from penstock.partition.names import canonical_names, is_below, resolve, unwrapped
from penstock.partition.recording import Recording
from penstock.partition.units import LISTS, Opening, Unit, find_units, repeats

WORTHWHILE = 0.95
"""Modules are opened if that shrinks the largest stage below this fraction of its size."""


def opening_for(
    model: nn.Module, leaves: Sequence[str], opens: Sequence[str], cuts: Sequence[str] | None, stages: int
) -> Opening:
    """Return what to open before anything is recorded. Raise PartitionError for names that cannot be opened.

    If cuts have to be found, the number of repeated blocks stands in for the work, which is not known yet.
    """
    names = canonical_names(model)
    leaf_names = {names[id(resolve(model, name, "leaf_modules"))] for name in leaves}
    requested = {names[id(resolve(model, name, "split_inside"))] for name in opens}
    paths = {find_call(model, cut).path for cut in cuts or ()}
    for argument, to_open in (("split_inside", requested), ("cuts", {name.rpartition(".")[0] for name in paths})):
        for name in to_open:
            leaf = next((leaf for leaf in leaf_names if is_below(name, leaf)), None)
            if leaf is not None:
                raise PartitionError(
                    f"{argument}: {name!r} is to be opened, but leaf_modules=[{leaf!r}] says that it runs as a whole"
                )
    opening = Opening(frozenset(n for name in requested for n in (*_enclosing(name), name)))
    units = {unit.name for unit in find_units(model, leaves, apart=opening.names).values()}
    enclosing = {n for name in paths for n in _enclosing(name)}
    opening = replace(opening, for_cuts=frozenset(n for n in enclosing if any(is_below(n, unit) for unit in units)))
    while cuts is None:
        order = list(find_units(model, leaves, apart=opening.names).values())
        weights = [count_blocks(unit.module) if unit.repeated else 0 for unit in order]
        worthwhile = frozenset(_worth_opening(order, weights, stages, leaf_names))
        if not worthwhile:
            break
        opening = replace(opening, for_balance=opening.for_balance | worthwhile)
    return opening


def extend_opening(model: nn.Module, opening: Opening, profile: Profile) -> Opening:
    """Extend the opening by what was opened when the profile was made, so that the same units are there."""
    module_names = {name for name, _ in model.named_modules()}
    return replace(
        opening, for_balance=opening.for_balance | (module_names.intersection(profile.opened) - opening.names)
    )


def choose_opening(
    recording: Recording,
    model: nn.Module,
    leaves: Sequence[str],
    stages: int,
    balance: Measure,
    seconds: Mapping[str, float] | None = None,
) -> Opening:
    """Return what to open now that weights are known: the recording's own opening if nothing else is worth opening.

    Args:
        seconds: what was measured of each unit, by name, to weigh them by instead of `balance`.
    """
    opening = recording.opening
    current_units = find_units(model, leaves, recording.unit_spec, opening.names).values()
    units = {unwrapped(unit.name): unit for unit in current_units}
    pieces = candidates(recording, model, balance)
    if seconds is not None:
        sums, name = dict[str, float](), pieces[0].name  # units may be finer than pieces
        for unit, unit_seconds in seconds.items():
            name = unit if any(unit == piece.name for piece in pieces) else name
            sums[name] = sums.get(name, 0.0) + unit_seconds
        pieces = [replace(piece, weight=round(1e9 * sums[piece.name])) for piece in pieces if piece.name in sums]
    if sum(is_mark(p.name) for p in pieces) >= stages - 1:
        return opening
    modules = dict(model.named_modules())
    order = [units.get(p.name) or Unit(p.name, modules.get(p.name, nn.Identity()), repeated=False) for p in pieces]
    names = canonical_names(model)
    fixed = opening.cannot_open | {names[id(resolve(model, name, "leaf_modules"))] for name in leaves}
    worthwhile = _worth_opening(order, [p.weight for p in pieces], stages, fixed)
    return replace(opening, for_balance=opening.for_balance | frozenset(worthwhile))


def _worth_opening(units: Sequence[Unit], weights: Sequence[int], stages: int, fixed: Collection[str]) -> Iterator[str]:
    """Yield the modules inside which the best cuts would fall, if opening them is worthwhile. Leave out `fixed`.

    Assumes that all repeated blocks of a module weigh the same.
    """
    counts = [count_blocks(unit.module) if unit.name not in fixed and _may_open(unit.module) else 1 for unit in units]
    if max(counts, default=1) == 1 or stages == 1:
        return
    pieces = [weight // count for weight, count in zip(weights, counts, strict=True) for _ in range(count)]
    if stages > len(pieces):
        return
    starts = even_starts(pieces, stages)
    heaviest_whole = heaviest_stage(weights, even_starts(weights, stages)) if stages <= len(units) else math.inf
    if heaviest_stage(pieces, starts) > WORTHWHILE * heaviest_whole:
        return
    ends = list(accumulate(counts))
    for unit, end, count in zip(units, ends, counts, strict=True):
        if any(end - count < start < end for start in starts):
            yield unit.name


def _may_open(module: nn.Module) -> bool:
    """Whether a module can be opened: nothing in it has hooks that would run during recording and never again."""
    lists = (child for child in module.children() if isinstance(child, (*LISTS, nn.Sequential)))
    return not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (module, *lists))


def count_blocks(module: nn.Module) -> int:
    """Return how many repeated blocks a module can be opened into, down to those that contain none; 1 if it contains
    none."""
    total = 0
    for child in module.children():
        inner = sum(count_blocks(block) for block in child.children()) if repeats(child) else count_blocks(child)
        total += inner if inner > 1 else 0
    return max(1, total)


def _enclosing(name: str) -> list[str]:
    """Return the names of the modules around a module, except the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
