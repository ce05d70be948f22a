"""Finds the positions in a recording at which to cut, given names of modules, and the names that balance the stages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from torch import fx, nn

from penstock.errors import PartitionError
from penstock.partition.recording.recording import Recording
from penstock.partition.units.units import resolve
from penstock.words import counted

Weighed = Literal["flops", "parameters", "layers"]
"""What a recording says of each module by itself."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module before whose first call the model can be cut.

    `weight`: the total from here to the next candidate, in the measure to be balanced.
    """

    name: str
    position: int
    weight: int


def candidates(recording: Recording, model: nn.Module, balance: Weighed) -> list[Candidate]:
    """Every unit in the order of first calls, and opened modules with nothing inside.

    For "layers", only repeated blocks, if there are any.
    """
    blocks_only = balance == "layers" and bool(recording.blocks)
    bare = {n for n in recording.grain.opened if not any(True for _ in model.get_submodule(n).children())}
    found: list[Candidate] = []
    seen: set[str] = set()
    weight = position = 0
    name = ""
    for node, fact in recording.facts.items():
        begins = fact.kind == "unit" or (fact.kind in ("call", "parameter", "buffer") and fact.scope in bare)
        if begins and fact.scope not in seen and (not blocks_only or fact.scope in recording.blocks):
            if seen:
                found.append(Candidate(name, position, weight))
                weight = 0
            name, position = fact.scope, fact.index
            seen.add(name)
        weight += _weight(recording, model, node, "parameters" if balance == "layers" and not blocks_only else balance)
    if seen:
        found.append(Candidate(name, position, weight))
    return found


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


def balanced_cuts(
    recording: Recording, model: nn.Module, stages: int, balance: Weighed, units: Sequence[Candidate] | None = None
) -> tuple[str, ...]:
    """Names of the modules at which stages 1.. begin so that the largest stage is as small as possible.

    Chosen from all candidates, or from `units`. Raises TooFewLayersError if there are more stages than candidates.
    """
    units = candidates(recording, model, balance) if units is None else units
    if stages > max(1, len(units)):
        raise TooFewLayersError(_too_few(recording, model, stages, balance, units))
    starts = linear_partition([unit.weight for unit in units], stages)
    return tuple(units[start].name for start in starts[1:])


class TooFewLayersError(PartitionError):
    """There are more stages than layers."""


def _too_few(recording: Recording, model: nn.Module, stages: int, balance: Weighed, units: Sequence[Candidate]) -> str:
    if not units:
        return (
            f"stages={stages}, but this {type(model).__name__} calls no module that a stage could begin with. "
            "Use 1 stage, or a model that is made of several modules"
        )
    kind = "repeated block" if balance == "layers" and recording.blocks else "layer"
    nested = [unit for unit in units if any(True for _ in model.get_submodule(unit.name).children())]
    heaviest = max(nested, key=lambda unit: unit.weight).name if nested else None
    return (
        f"stages={stages}, but the model has only {counted(len(units), kind)} to share among them. Use at most "
        f"{counted(len(units), 'stage')}" + (f", or take some apart with opens=[{heaviest!r}, ...]" if heaviest else "")
    )


def linear_partition(weights: Sequence[int], parts: int) -> list[int]:
    """Divides weights into `parts` runs of one or more consecutive items, and returns where each run begins.

    Minimizes the largest sum, then the sum of squares. In a tie, items that weigh nothing stay in the earlier run.

    The best start of the last run never moves back as its end moves forward. So the middle end is solved first, which
    halves the search for the ends on either side of it: parts x items x log(items) sums.
    """
    if parts == 1 or not weights:
        return [0]
    totals, limit, count = [0, *accumulate(weights)], _smallest_limit(weights, parts), len(weights)
    squares = {0: 0}  # by the end of the runs so far
    chosen: list[dict[int, int]] = []  # for each run, its start by its end
    for part in range(1, parts + 1):
        reach = bisect_right(totals, totals[max(squares)] + limit) - 1
        ends = range(part, min(reach, count - (parts - part)) + 1)
        chosen.append(_best_starts(totals, squares, limit, ends))
        squares = {end: squares[start] + (totals[end] - totals[start]) ** 2 for end, start in chosen[-1].items()}
    starts: list[int] = []
    end = count
    for by_end in reversed(chosen):
        end = by_end[end]
        starts.append(end)
    return starts[::-1]


def _best_starts(totals: Sequence[int], squares: Mapping[int, int], limit: int, ends: range) -> dict[int, int]:
    """For each end of a run, the start that gives the least sum of squares under the limit."""
    found: dict[int, int] = {}
    pending = [(ends, min(squares), max(squares))]
    while pending:
        some, first, last = pending.pop()
        if not some:
            continue
        middle = len(some) // 2
        end = some[middle]
        least = max(first, bisect_left(totals, totals[end] - limit))
        within = range(min(last, end - 1), least - 1, -1)
        best = found[end] = min(within, key=lambda start: squares[start] + (totals[end] - totals[start]) ** 2)
        pending += [(some[:middle], first, best), (some[middle + 1 :], best, last)]
    return found


def _smallest_limit(weights: Sequence[int], parts: int) -> int:
    """The least bound on a run's sum for which `parts` runs hold all weights: greedy filling in a binary search."""

    def runs(limit: int) -> int:
        number, size = 1, 0
        for weight in weights:
            if size + weight > limit:
                number, size = number + 1, 0
            size += weight
        return number

    low, high = max(weights), sum(weights)
    return low + bisect_left(range(low, high), True, key=lambda limit: runs(limit) <= parts)


def cut_positions(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> list[int]:
    """The index of the first node of each stage from stage 1 on. Raises PartitionError for names that give no stage."""
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    positions = [_position(recording, names[id(resolve(model, cut, "cuts"))], cut) for cut in cuts]
    for (before, start), (after, end) in pairwise(zip(cuts, positions, strict=True)):
        if start >= end:
            first, second = (after, before) if start > end else (before, after)
            why = f"{first!r} runs before {second!r}" if start > end else "both begin at the same call"
            raise PartitionError(
                f"cuts: {before!r} comes before {after!r} in the list, but {why}. Name each stage's first "
                f"module once, in the order in which the model runs them"
            )
    return positions


def _position(recording: Recording, name: str, given: str) -> int:
    inside = next((u for u in _units(recording) if name.startswith(f"{u}.")), None)
    if inside:
        raise PartitionError(f"cuts: {given!r} is inside {inside!r}, which runs as a whole. Cut at {inside!r} instead")
    for fact in recording.facts.values():
        scopes = (fact.scope, *fact.units)
        if fact.kind in ("call", "unit") and any(s == name or s.startswith(f"{name}.") for s in scopes):
            return fact.index
    raise PartitionError(f"cuts: {given!r} never runs for these inputs. Name a module that the forward calls")


def _units(recording: Recording) -> Iterator[str]:
    return (f.scope for f in recording.facts.values() if f.kind == "unit")
