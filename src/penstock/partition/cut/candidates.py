"""The candidates for cuts and what each weighs, and the cutting itself.

A cut must not separate the uses of anything that the forward updates in place: they must be on one stage. An example is
a batch norm in an encoder that is called once for each view of an image: a cut between two of these calls would give
each stage its own running statistics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torch import fx, nn

from penstock._base.compat import any_autocast
from penstock._base.errors import PartitionError
from penstock._base.formatting import pluralize
from penstock.costs import CutProblem, best_cuts
from penstock.partition.cut.names import cut_positions, is_mark, named_calls
from penstock.partition.names import unwrapped
from penstock.partition.recording import Recording
from penstock.partition.stages.stage_plans import HELD, CutRecording

Measure = Literal["flops", "parameters", "layers"]
"""What a recording says of each module by itself."""

WORTH_FINER = 0.8
"""More places for cuts are taken if these make the largest stage smaller than this fraction of its size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call, usually the first one of a module, before which the model can be cut; see `names`.

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
