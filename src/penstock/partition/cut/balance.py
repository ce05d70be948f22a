"""Finds the positions in a recording at which to cut, given names, and the names that balance the stages.

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
from penstock._base.words import counted
from penstock.costs import Problem, best_starts
from penstock.partition.cut.places import is_mark, named_calls, position_of
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import HELD, CutRecording
from penstock.partition.units.chain import unwrapped

Weighed = Literal["flops", "parameters", "layers"]
"""What a recording says of each module by itself."""


EVENER = 0.8
"""More places for cuts are taken if these make the largest stage smaller than this fraction of its size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call, usually the first one of a module, before which the model can be cut; see `places`.

    `weight`: the total from here to the next candidate, in the measure to be balanced.
    """

    name: str
    position: int
    weight: int


def candidates(recording: Recording, model: nn.Module, balance: Weighed, stages: int = 0) -> list[Candidate]:
    """Every unit in the order of first calls, opened modules with nothing inside, and marks (`penstock.cut()`), as far
    as they run something which no other stage can compute for itself.

    For "layers", only repeated blocks, if there are any. If these stages have enough marks, only marks. If they have
    too few candidates, or would be far from even, also later calls of units, and calls outside the units that take a
    parameter. Autocast casts a weight once for all its uses and rounds their sum, which stages would not: under it
    stages that are far from even stay so.
    """
    found = _weighed(recording, model, balance, _places(recording, model, balance, finer=False))
    marks = [one for one in found[1:] if is_mark(one.name)]
    if 0 < stages - 1 <= len(marks):
        return _weighed(recording, model, balance, {one.name: one.position for one in (found[0], *marks)})
    if stages > 1:
        more = _weighed(recording, model, balance, _places(recording, model, balance, finer=True))
        casts = any_autocast() or any(fact.modes.autocast is not None for fact in recording.facts.values())
        if stages > len(found):
            return more if stages <= len(more) or 0 < len(found) < len(more) else found
        if stages <= len(more) and not casts and _is_evener(more, found, stages):
            return more
    return found


def _is_evener(units: Sequence[Candidate], others: Sequence[Candidate], stages: int) -> bool:
    weights = ([unit.weight for unit in each] for each in (units, others))
    one, other = (heaviest_stage(each, even_starts(each, stages)) for each in weights)
    return one < EVENER * other


def _weighed(recording: Recording, model: nn.Module, balance: Weighed, places: Mapping[str, int]) -> list[Candidate]:
    own = CutRecording(recording, model, (), [*places.values()][1:]).own
    found, waits = dict[str, int](), False  # waits: no call has followed a mark, which goes before a module there
    for (name, position), calls in zip(places.items(), own, strict=False):
        found |= {name: position} if not waits and (calls or is_mark(name)) else {}
        waits = (waits or is_mark(name)) and not calls
    if waits:
        found.popitem()
    positions, weights = [*found.values()], [0] * len(found)
    by = "parameters" if balance == "layers" and not recording.blocks else balance
    for node, fact in recording.facts.items() if found else ():
        weights[max(bisect_right(positions, fact.index) - 1, 0)] += _weight(recording, model, node, by)
    return [Candidate(*place, weight) for place, weight in zip(found.items(), weights, strict=True)]


def _places(recording: Recording, model: nn.Module, balance: Weighed, *, finer: bool) -> dict[str, int]:
    """Where candidates begin, by name. Calls on parameters alone (`weight[i]`) go with the call that follows them."""
    bare = {n for n in recording.grain.opened if not any(True for _ in model.get_submodule(n).children())}
    blocks_only = balance == "layers" and bool(recording.blocks)
    found, first, alone = dict[str, int](), dict[str, int](), False
    for node, name in named_calls(recording, model):
        fact, begin = recording.facts[node], _begin(recording, node)
        kinds = {recording.facts[given].kind for given in node.all_input_nodes}
        first = first or {name: begin}
        counts = not blocks_only or fact.scope in recording.blocks
        if is_mark(name):
            found = {**(found or first), name: begin}
        elif counts and (fact.kind == "unit" or fact.scope in bare) and unwrapped(fact.scope) not in found:
            found[unwrapped(fact.scope)] = begin
        elif counts and finer and (fact.kind == "unit" or ("parameter" in kinds and not alone)):
            found[name] = begin
        alone = bool(kinds) and kinds <= {*HELD}
    return found


def _begin(recording: Recording, node: fx.Node) -> int:
    """The index of a call, or of the first parameter or buffer that it is the first to use."""
    facts = recording.facts
    own = (given for given in node.all_input_nodes if facts[given].kind in HELD and next(iter(given.users)) is node)
    return min(facts[each].index for each in (node, *own))


def _weight(recording: Recording, model: nn.Module, node: fx.Node, balance: Weighed) -> int:
    """A node's weight: its work, the number of elements in its parameters, or whether it calls a repeated block."""
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
    recording: Recording, model: nn.Module, stages: int, balance: Weighed, units: Sequence[Candidate]
) -> None:
    """Raises TooFewLayersError if there are more stages than candidates."""
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
        f"stages={stages}, but the model has only {counted(len(units), kind)} to share among them. Use at most "
        f"{counted(len(units), 'stage')}" + (f", or take some apart with opens=[{heaviest!r}, ...]" if heaviest else "")
    )


def even_starts(weights: Sequence[int], stages: int) -> list[int]:
    """The unit with which each stage begins, so that the heaviest is as light as can be; see `best_starts`.

    Weights count in steps of 1/2^25 of their total, in which squares add up exactly, so that equal units are equal in
    any order. Up to such steps the stages are the best.
    """
    unit = max(1, sum(weights) >> 25)
    return best_starts(Problem([weight // unit for weight in weights]), stages)


def heaviest_stage(weights: Sequence[int], starts: Sequence[int]) -> int:
    """The weight of the heaviest stage."""
    return max(sum(weights[start:end]) for start, end in pairwise((*starts, len(weights))))


def cut_at(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> CutRecording:
    """The recording, cut at these names. Raises PartitionError if it cannot be."""
    split = CutRecording(recording, model, cuts, cut_positions(recording, model, cuts))
    _ = split.plans  # raise now, while something else can be tried
    return split


def cut_positions(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> list[int]:
    """The index of the first node of each stage from stage 1 on. Raises PartitionError for names that give no stage."""
    positions = [position_of(recording, model, cut) for cut in cuts]
    for (before, start), (after, end) in pairwise(zip(cuts, positions, strict=True)):
        if start >= end:
            first, second = (after, before) if start > end else (before, after)
            why = f"{first!r} runs before {second!r}" if start > end else "both begin at the same call"
            raise PartitionError(
                f"cuts: {before!r} comes before {after!r} in the list, but {why}. Name each stage's first "
                f"module once, in the order in which the model runs them"
            )
    return positions


@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last call that use something; `name` says what."""

    name: str
    first: int
    last: int

    def parts(self, position: int) -> bool:
        """Whether beginning a stage at this call would separate the uses."""
        return self.first < position <= self.last


def spans(recording: Recording, model: nn.Module) -> tuple[Span, ...]:
    """The spans of everything that the forward updates in place and uses more than once."""
    whole = CutRecording(recording, model, (), ())
    users: dict[str, list[int]] = {}
    for node, fact in recording.facts.items():
        for name in _updated(whole, node):
            users.setdefault(name, []).append(fact.index)
    return tuple(Span(name, min(used), max(used)) for name, used in users.items() if min(used) < max(used))


def _updated(whole: CutRecording, node: fx.Node) -> set[str]:
    """The names of what a node uses and the forward updates."""
    recording, fact = whole.recording, whole.facts[node]
    used = fact.storages.union(*(whole.facts[given].storages for given in node.all_input_nodes))
    found = {recording.memory[storage] for storage in used if storage in recording.memory}
    found = (found | {*whole.held_by(node)}) & whole.updated
    if fact.kind == "constant" and not whole.written.isdisjoint(fact.storages):
        found.add(str(node.target))
    return found | {each.text for each in recording.remembered if whole.uses(node, each)}


def joined(units: Sequence[Candidate], kept: Sequence[Span]) -> list[Candidate]:
    """The candidates at which a cut separates nothing. The weight of the others goes to the candidate before them."""
    found: list[Candidate] = []
    for unit in units:
        if found and any(span.parts(unit.position) for span in kept):
            found[-1] = replace(found[-1], weight=found[-1].weight + unit.weight)
        else:
            found.append(unit)
    return found


def too_few(error: PartitionError, stages: int, left: Sequence[Candidate], kept: Sequence[Span]) -> PartitionError:
    """The error for a model with too few cuts that keep such uses together. `error`: what an even cut raised."""
    longest = max(kept, key=lambda span: span.last - span.first)
    return PartitionError(
        f"{error}. For stages={stages} there is no such cut: the uses of {longest.name!r} leave "
        f"{counted(len(left), 'stage')} at most"
    )
