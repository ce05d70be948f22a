"""Finds the modules to open for `split_inside=`, for cuts that lie inside, and for balance, in addition to those that
`units.py` opens by its rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from penstock._base.errors import PartitionError
from penstock.partition.cut.candidates import Measure, candidates, even_starts, heaviest_stage
from penstock.partition.cut.names import find_call, is_mark
from penstock.partition.names import canonical_names, enclosing, is_below, resolve, unwrapped
from penstock.partition.recording import Recording
from penstock.partition.units import LISTS, Unit, UnitSpec, find_units, repeats

WORTHWHILE = 0.95
"""Modules are opened if that shrinks the largest stage below this fraction of its size."""


def initial_spec(
    model: nn.Module, leaves: Sequence[str], opens: Sequence[str], cuts: Sequence[str] | None, stages: int
) -> UnitSpec:
    """Return what runs whole and what to open before anything is recorded. Raise PartitionError for names that are no
    modules, or cannot be opened.

    If cuts have to be found, the number of repeated blocks stands in for the work, which is not known yet.
    """
    names = canonical_names(model)
    spec = UnitSpec(tuple(names[id(resolve(model, name, "leaf_modules")[1])] for name in leaves))
    requested = {names[id(resolve(model, name, "split_inside")[1])] for name in opens}
    paths = {find_call(model, cut).path for cut in cuts or ()}
    for argument, to_open in (("split_inside", requested), ("cuts", {name.rpartition(".")[0] for name in paths})):
        for name in to_open:
            leaf = next((leaf for leaf in spec.leaves if is_below(name, leaf)), None)
            if leaf is not None:
                raise PartitionError(
                    f"{argument}: {name!r} is to be opened, but leaf_modules=[{leaf!r}] says that it runs as a whole"
                )
    spec = spec.opening_more(asked=(n for name in requested for n in enclosing(name)))
    units = {unit.name for unit in find_units(model, spec).values()}
    around = {n for name in paths for n in [*enclosing(name)][:-1]}
    spec = spec.opening_more(for_cuts=(n for n in around if any(is_below(n, unit) for unit in units)))
    while cuts is None:
        order = list(find_units(model, spec).values())
        weights = [count_blocks(unit.module) if unit.repeated else 0 for unit in order]
        worthwhile = [*_worth_opening(order, weights, stages, spec.leaves)]
        if not worthwhile:
            break
        spec = spec.opening_more(for_balance=worthwhile)
    return spec


def choose_opening(
    recording: Recording,
    model: nn.Module,
    stages: int,
    balance: Measure,
    seconds: Mapping[str, float] | None = None,
) -> UnitSpec:
    """Return what to open now that weights are known: the recording's own spec if nothing else is worth opening.

    Args:
        seconds: what was measured of each unit, by name, to weigh them by instead of `balance`.
    """
    spec = recording.unit_spec
    units = {unwrapped(unit.name): unit for unit in find_units(model, spec).values()}
    pieces = candidates(recording, model, balance)
    if seconds is not None:
        sums, name = dict[str, float](), pieces[0].name  # units may be finer than pieces
        for unit, unit_seconds in seconds.items():
            name = unit if any(unit == piece.name for piece in pieces) else name
            sums[name] = sums.get(name, 0.0) + unit_seconds
        pieces = [replace(piece, weight=round(1e9 * sums[piece.name])) for piece in pieces if piece.name in sums]
    if sum(is_mark(p.name) for p in pieces) >= stages - 1:
        return spec
    modules = dict(model.named_modules())
    order = [units.get(p.name) or Unit(p.name, modules.get(p.name, nn.Identity()), repeated=False) for p in pieces]
    fixed = spec.opening.cannot_open.union(spec.leaves)
    return spec.opening_more(for_balance=_worth_opening(order, [p.weight for p in pieces], stages, fixed))


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
