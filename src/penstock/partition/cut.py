"""Where to cut: names of modules -> positions in a recording, and the names that balance the stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.recording import Recording
from penstock.partition.units import resolve

Balance = Literal["parameters", "layers"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module before whose first call the model can be cut.

    `parameters`: how many numbers are in the parameters used from here up to the next candidate; `layers`: how many
    calls of repeated blocks.
    """

    name: str
    position: int
    parameters: int
    layers: int


def candidates(recording: Recording, model: nn.Module, blocks_only: bool = False) -> list[Candidate]:
    """Every unit (or repeated block) in the order of first calls, and what was opened and has nothing inside."""
    bare = {n for n in recording.grain.opened if not any(True for _ in model.get_submodule(n).children())}
    found: list[Candidate] = []
    seen: set[str] = set()
    parameters = layers = position = 0
    name = ""
    for node, fact in recording.facts.items():
        begins = fact.kind == "unit" or (fact.kind in ("call", "parameter", "buffer") and fact.scope in bare)
        if begins and fact.scope not in seen and (not blocks_only or fact.scope in recording.blocks):
            if seen:
                found.append(Candidate(name, position, parameters, layers))
                parameters = layers = 0
            name, position = fact.scope, fact.index
            seen.add(name)
        if fact.kind == "unit":
            parameters += sum(p.numel() for p in model.get_submodule(fact.scope).parameters())
            layers += fact.scope in recording.blocks
        elif fact.kind == "parameter":
            parameters += recording.held[str(node.target)].numel()
    if seen:
        found.append(Candidate(name, position, parameters, layers))
    return found


def balanced_cuts(recording: Recording, model: nn.Module, stages: int, balance: Balance) -> tuple[str, ...]:
    """Names of the modules at which stages 1.. begin, so that the largest stage is as small as can be.

    Raises PartitionError if there are more stages than modules to begin them with.
    """
    by_layers = balance == "layers" and bool(recording.blocks)
    units = candidates(recording, model, blocks_only=by_layers)
    if stages > max(1, len(units)):
        kind = "repeated blocks" if by_layers else "layers"
        raise PartitionError(
            f"stages={stages}, but the model has only {len(units)} {kind} to share among them. Use at most "
            f"{len(units)} stages"
        )
    weights = [u.layers if by_layers else u.parameters for u in units]
    return tuple(units[start].name for start in linear_partition(weights, stages)[1:])


def linear_partition(weights: Sequence[int], parts: int) -> list[int]:
    """Where each of `parts` runs of consecutive weights begins, each of one item or more.

    The largest sum is as small as can be; among those, the sum of squares.
    """
    if parts == 1 or not weights:
        return [0]
    totals = [0, *accumulate(weights)]
    limit = _smallest_limit(weights, parts)
    count = len(weights)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # end of the runs so far -> squares, their starts
    for part in range(parts):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (squares, starts) in sorted(best.items()):
            for end in range(start + 1, count - (parts - part - 1) + 1):
                size = totals[end] - totals[start]
                if size > limit:
                    break
                total = squares + size * size
                if end not in longer or total <= longer[end][0]:  # of equals, what weighs nothing stays behind
                    longer[end] = total, [*starts, start]
        best = longer
    return best[count][1]


def _smallest_limit(weights: Sequence[int], parts: int) -> int:
    """The least bound under which `parts` runs hold all weights: greedy filling within a binary search."""

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
        if fact.kind in ("call", "unit") and (fact.scope == name or fact.scope.startswith(f"{name}.")):
            return fact.index
    raise PartitionError(f"cuts: {given!r} never runs for these inputs. Name a module that the forward calls")


def _units(recording: Recording) -> Iterator[str]:
    return (f.scope for f in recording.facts.values() if f.kind == "unit")
