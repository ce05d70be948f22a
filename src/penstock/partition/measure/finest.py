"""A recording cut before every module before which it can be cut: one stage for each unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.cut.balance import Candidate, cut_positions
from penstock.partition.cut.inseparable import joined, spans
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording


def finest_cut(
    recording: Recording, model: nn.Module, units: Sequence[Candidate]
) -> tuple[list[Candidate], CutRecording]:
    """The candidates at which the recording can be cut, all at once, and the recording cut there.

    The weight of the others goes to the candidate before them. Raises PartitionError if not even one cut is possible.
    """
    kept = joined(units, spans(recording, model))
    try:
        return kept, _cut(recording, model, kept)
    except PartitionError:
        possible = [kept[0]]
        for unit in kept[1:]:
            if _can_cut(recording, model, [kept[0], unit]):
                possible.append(unit)
            else:
                possible[-1] = replace(possible[-1], weight=possible[-1].weight + unit.weight)
        return possible, _cut(recording, model, possible)


def _cut(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> CutRecording:
    cuts = [unit.name for unit in units[1:]]
    split = CutRecording(recording, model, cuts, cut_positions(recording, model, cuts))
    _ = split.plans  # raises if it cannot be cut there
    return split


def _can_cut(recording: Recording, model: nn.Module, units: Sequence[Candidate]) -> bool:
    try:
        _cut(recording, model, units)
    except PartitionError:
        return False
    return True
