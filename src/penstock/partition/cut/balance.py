"""Finds the positions in a recording at which to cut, given names, and the names that balance the stages. A name:

    layer          the first call of this module
    layer:2        its second call
    cut#1          the first `penstock.cut()`, or `pipe_split()` of torch, in the model's own forward
    block.relu#2   the second call of `relu` in the own forward of `block`

A layer that a list or sequence holds twice, as `0` and `2`, is called the first time as `0` and the second time as `2`.

A cut must not separate the uses of anything that the forward updates in place: they must be on one stage. An example is
a batch norm in an encoder that is called once for each view of an image: a cut between two of these calls would give
each stage its own running statistics.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import fx, nn

from penstock._base.compat import any_autocast
from penstock._base.errors import PartitionError
from penstock._base.formatting import pluralize
from penstock._base.marks import cut
from penstock.costs import CutProblem, best_cuts
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import HELD, CutRecording
from penstock.partition.units.chain import Chain, unwrapped
from penstock.partition.units.units import canonical_names, named_module, real_name, resolve

_LATER = re.compile(r"(.+)([:#])([1-9]\d*)")


class CallSite(NamedTuple):
    """A call: of a module, by its canonical name, or of a function in that module's own forward; and which one."""

    module: str
    function: str
    number: int

    @property
    def path(self) -> str:
        """Its name as if it were a module, which says what must be opened around it."""
        return f"{self.module}.{self.function}".strip(".")


def find_call(model: nn.Module, name: str) -> CallSite:
    """Return what a cut of this name stands for. Raise PartitionError if the model has no such module."""
    match = _LATER.fullmatch(name) if named_module(model, name) is None else None
    path, sign, number = match.groups() if match else (name, ":", "1")
    owner, _, function = path.rpartition(".") if sign == "#" else (path, "", "")
    module = resolve(model, owner, "cuts") if owner else model
    offset = 0 if function else _slots(model, real_name(model, path)).index(real_name(model, path))
    return CallSite(canonical_names(model)[id(module)], function, int(number) + offset)


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module that a cut of this name is a call of, or in."""
    return model.get_submodule(find_call(model, name).module)


def is_mark(name: str) -> bool:
    """Whether a cut of this name is a mark (`penstock.cut()`)."""
    return name.rpartition("#")[0].rpartition(".")[2] == cut.__name__


def named_calls(recording: Recording, model: nn.Module) -> Iterator[tuple[fx.Node, str]]:
    """Yield the calls of a recording, each with its name as a cut."""
    counts: Counter[str] = Counter()
    for node, fact in recording.facts.items():
        counts.update(fact.units)
        if fact.kind == "unit":
            number, slots = counts[fact.scope], _slots(model, fact.scope)
            yield node, unwrapped(slots[number - 1] if number <= len(slots) else f"{fact.scope}:{number}")
        elif fact.kind == "call":
            function = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")
            path = f"{unwrapped(fact.scope)}.{function}#".lstrip(".")
            counts[path] += 1
            yield node, f"{path}{counts[path]}"


def find_position(recording: Recording, model: nn.Module, name: str) -> int:
    """Return the index of the node that a cut of this name stands for. Raise PartitionError if it gives no stage."""
    site = find_call(model, name)
    facts = recording.facts
    unit = next((f.scope for f in facts.values() if f.kind == "unit" and site.path.startswith(f"{f.scope}.")), None)
    if unit:
        raise PartitionError(f"cuts: {name!r} is inside {unit!r}, which runs as a whole. Cut at {unit!r} instead")
    if site.function:
        path = f"{unwrapped(site.path)}#{site.number}"
        indices = (facts[node].index for node, call_name in named_calls(recording, model) if call_name == path)
    else:
        entered = (0, *recording.entered.get(site.module, ())[1:])[site.number - 1 : site.number]
        indices = (
            fact.index
            for fact in facts.values()
            if fact.kind in ("call", "unit") and entered and fact.index >= entered[0]
            if any(f"{scope}.".startswith(f"{site.module}.") for scope in (fact.scope, *fact.units))
        )
    if (position := next(indices, None)) is not None:
        return position
    remedy = "Name a call that it makes" if site.function else "Name a module that the forward calls"
    raise PartitionError(f"cuts: {name!r} never runs for these inputs. {remedy}")


def _slots(model: nn.Module, name: str) -> list[str]:
    """Return the names under which the list or sequence around a module holds it, in order; else just its name."""
    parent_name, dot, _ = name.rpartition(".")
    parent, module = model.get_submodule(parent_name), model.get_submodule(name)
    if not isinstance(parent, (Chain, nn.Sequential, nn.ModuleList)):
        return [name]
    return [f"{parent_name}{dot}{key}" for key, child in parent._modules.items() if child is module]


Measure = Literal["flops", "parameters", "layers"]
"""What a recording says of each module by itself."""


WORTH_FINER = 0.8
"""More places for cuts are taken if these make the largest stage smaller than this fraction of its size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call, usually the first one of a module, before which the model can be cut; see `places`.

    `weight`: the total from here to the next candidate, in the measure to be balanced.
    """

    name: str
    position: int
    weight: int


def candidates(recording: Recording, model: nn.Module, balance: Measure, stages: int = 0) -> list[Candidate]:
    """Return every unit in the order of first calls, opened modules with nothing inside, and marks (`penstock.cut()`),
    as far as they run something that no other stage can compute for itself.

    For "layers", only repeated blocks, if there are any. If these stages have enough marks, only marks. If they have
    too few candidates, or would be far from even, also later calls of units, and calls outside the units that take a
    parameter. Autocast casts a weight once for all its uses and rounds their sum, which stages would not: under it
    stages that are far from even stay so.
    """
    coarse = _weigh(recording, model, balance, _find_positions(recording, model, balance, finer=False))
    marks = [unit for unit in coarse[1:] if is_mark(unit.name)]
    if 0 < stages - 1 <= len(marks):
        return _weigh(recording, model, balance, {unit.name: unit.position for unit in (coarse[0], *marks)})
    if stages > 1:
        finer = _weigh(recording, model, balance, _find_positions(recording, model, balance, finer=True))
        casts = any_autocast() or any(fact.modes.autocast is not None for fact in recording.facts.values())
        if stages > len(coarse):
            return finer if stages <= len(finer) or 0 < len(coarse) < len(finer) else coarse
        if stages <= len(finer) and not casts and _is_evener(finer, coarse, stages):
            return finer
    return coarse


def _is_evener(units: Sequence[Candidate], others: Sequence[Candidate], stages: int) -> bool:
    weights = ([unit.weight for unit in group] for group in (units, others))
    heaviest, other_heaviest = (heaviest_stage(group, even_starts(group, stages)) for group in weights)
    return heaviest < WORTH_FINER * other_heaviest


def _weigh(recording: Recording, model: nn.Module, balance: Measure, begins: Mapping[str, int]) -> list[Candidate]:
    stage_calls = CutRecording(recording, model, (), [*begins.values()][1:]).local_calls
    starts, after_mark = dict[str, int](), False  # whether no call has followed a mark yet, which goes before a module
    for (name, position), calls in zip(begins.items(), stage_calls, strict=False):
        starts |= {name: position} if not after_mark and (calls or is_mark(name)) else {}
        after_mark = (after_mark or is_mark(name)) and not calls
    if after_mark:
        starts.popitem()
    positions, weights = [*starts.values()], [0] * len(starts)
    measure = "parameters" if balance == "layers" and not recording.blocks else balance
    for node, fact in recording.facts.items() if starts else ():
        weights[max(bisect_right(positions, fact.index) - 1, 0)] += _weight(recording, model, node, measure)
    return [Candidate(*start, weight) for start, weight in zip(starts.items(), weights, strict=True)]


def _find_positions(recording: Recording, model: nn.Module, balance: Measure, *, finer: bool) -> dict[str, int]:
    """Return where candidates begin, by name. Calls on parameters alone (`weight[i]`) go with the call that follows
    them."""
    bare = {n for n in recording.unit_spec.opened if not any(True for _ in model.get_submodule(n).children())}
    blocks_only = balance == "layers" and bool(recording.blocks)
    positions, first, only_held = dict[str, int](), dict[str, int](), False
    for node, name in named_calls(recording, model):
        fact, held = recording.facts[node], [n for n in node.all_input_nodes if recording.facts[n].kind in HELD]
        # a parameter or buffer goes with the first call that uses it
        begin = min(recording.facts[n].index for n in (node, *(n for n in held if next(iter(n.users)) is node)))
        kinds = {recording.facts[argument].kind for argument in node.all_input_nodes}
        first = first or {name: begin}
        is_eligible = not blocks_only or fact.scope in recording.blocks
        if is_mark(name):
            positions = {**(positions or first), name: begin}
        elif is_eligible and (fact.kind == "unit" or fact.scope in bare) and unwrapped(fact.scope) not in positions:
            positions[unwrapped(fact.scope)] = begin
        elif is_eligible and finer and (fact.kind == "unit" or ("parameter" in kinds and not only_held)):
            positions[name] = begin
        only_held = bool(kinds) and kinds <= {*HELD}
    return positions


def _weight(recording: Recording, model: nn.Module, node: fx.Node, balance: Measure) -> int:
    """Return a node's weight: its work, the number of elements in its parameters, or whether it calls a repeated
    block."""
    fact = recording.facts[node]
    if balance == "flops":
        return fact.work
    if balance == "layers":
        return sum(unit in recording.blocks for unit in fact.units)
    if fact.kind == "unit":
        return sum(p.numel() for unit in fact.units for p in model.get_submodule(unit).parameters())
    return recording.held[str(node.target)].numel() if fact.kind == "parameter" else 0


class TooFewLayersError(PartitionError):
    """There are more stages than layers."""


def check_enough(
    recording: Recording, model: nn.Module, stages: int, balance: Measure, units: Sequence[Candidate]
) -> None:
    """Raise TooFewLayersError if there are more stages than candidates."""
    if stages <= max(1, len(units)):
        return
    if not units:
        raise TooFewLayersError(
            f"stages={stages}, but this {type(model).__name__} calls no module that a stage could begin with. "
            "Use 1 stage, or a model that is made of several modules"
        )
    kind = "repeated block" if balance == "layers" and recording.blocks else "layer"
    modules = dict(model.named_modules())
    nested = [unit for unit in units if any(True for _ in modules.get(unit.name, nn.Identity()).children())]
    heaviest = max(nested, key=lambda unit: unit.weight).name if nested else None
    raise TooFewLayersError(
        f"stages={stages}, but the model has only {pluralize(len(units), kind)} to share among them. Use at most "
        f"{pluralize(len(units), 'stage')}"
        + (f", or take some apart with split_inside=[{heaviest!r}, ...]" if heaviest else "")
    )


def even_starts(weights: Sequence[int], stages: int) -> list[int]:
    """Return the unit with which each stage begins, so that the heaviest is as light as can be; see `best_cuts`.

    Weights count in steps of 1/2^25 of their total, in which squares add up exactly, so that equal units are equal in
    any order. Up to such steps the stages are the best.
    """
    unit = max(1, sum(weights) >> 25)
    return best_cuts(CutProblem([weight // unit for weight in weights]), stages)


def heaviest_stage(weights: Sequence[int], starts: Sequence[int]) -> int:
    """Return the weight of the heaviest stage."""
    return max(sum(weights[start:end]) for start, end in pairwise((*starts, len(weights))))


def cut_at(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> CutRecording:
    """Cut the recording at these names. Raise PartitionError if it cannot be."""
    split = CutRecording(recording, model, cuts, cut_positions(recording, model, cuts))
    _ = split.plans  # raise now, while something else can be tried
    return split


def cut_positions(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> list[int]:
    """Return the index of the first node of each stage from stage 1 on. Raise PartitionError for names that give no
    stage."""
    positions = [find_position(recording, model, cut) for cut in cuts]
    for (before, start), (after, end) in pairwise(zip(cuts, positions, strict=True)):
        if start >= end:
            first, second = (after, before) if start > end else (before, after)
            reason = f"{first!r} runs before {second!r}" if start > end else "both begin at the same call"
            raise PartitionError(
                f"cuts: {before!r} comes before {after!r} in the list, but {reason}. Name each stage's first "
                f"module once, in the order in which the model runs them"
            )
    return positions


def possible_units(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> list[Candidate]:
    """The candidates at which the recording can be cut. The weight of each other goes to the one before it."""
    possible: list[Candidate] = []
    for unit in units:
        try:
            if possible:
                cut_at(recording, model, [unit.name])
            possible.append(unit)
        except PartitionError:
            possible[-1] = replace(possible[-1], weight=possible[-1].weight + unit.weight)
    return possible
