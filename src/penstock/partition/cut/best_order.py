"""The best cut of a recording along any order that its branches allow: two towers, an encoder beside an embedding.

The recorded order is one of many, and its best cut may be worse: of two towers that run one after the other, a stage
may get the ends of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.cut.any_order import Arranged, arranged, why_fixed
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording
from penstock.partition.values.memory import meta_bytes
from penstock.plan import Transfer, Work, WorkGraph, cut_graph, stage_seconds
from penstock.stages import MODEL_INPUT

MOST_DOWNSETS = 1024
"""Graphs with more are cut in the recorded order: the search would take more than about a second."""

WORTH = 0.98
"""The recorded order stays unless another makes the slowest stage faster than this part of what it takes."""


@dataclass(frozen=True, slots=True)
class Units:
    """What there is to cut, and into what. Sequences have an entry for each unit.

    Attributes:
        names: the units before which the recording can be cut, in its order; the first begins it.
        seconds: F + I + W.
        held_bytes, kept_bytes: what each holds all the time, and keeps for each microbatch.
        bytes_per_second: between two ranks.
        limit_bytes: what a stage may take.
        in_flight: the microbatches of each stage; empty: one.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    held_bytes: Sequence[float]
    kept_bytes: Sequence[float]
    bytes_per_second: float
    limit_bytes: float = math.inf
    in_flight: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """A better order.

    Attributes:
        stage_of: the stage of each unit, by name.
        seconds: what each stage takes.
        ratio: its slowest stage's time by that of the best cut in the recorded order.
        why_not: why it cannot be taken; empty if it can.
    """

    stage_of: Mapping[str, int]
    seconds: tuple[float, ...]
    ratio: float
    why_not: str = ""


def best_order(recording: Recording, model: nn.Module, units: Units, starts: Sequence[int]) -> Order | None:
    """The best cut of all orders, if it is worth it.

    Args:
        starts: the best cut in the recorded order: the unit with which each stage begins.
    """
    try:
        finest = arranged(recording, model, {name: number for number, name in enumerate(units.names)})
        if all(pair in finest.order for pair in pairwise(range(len(units.names)))):
            return None  # each needs the one before
        graph = _graph(finest, model, units)
    except PartitionError:  # calls that go with what they need cannot be parted from others
        return None
    ends = [*starts[1:], len(units.names)]
    recorded = max(stage_seconds(graph, [range(start, end) for start, end in zip(starts, ends, strict=True)]))
    found = cut_graph(
        graph,
        len(starts),
        memory_limit=units.limit_bytes,
        in_flight=units.in_flight or False,
        below=WORTH * recorded,
        most=MOST_DOWNSETS,
    )
    if found is None or len(found.stages) < len(starts) or not found.is_exact:
        return None
    stages = {unit: stage for stage, each in enumerate(found.stages) for unit in each}
    stage_of = {name: stages[unit] for unit, name in enumerate(units.names)}
    seconds = tuple(stage_seconds(graph, found.stages))
    return Order(stage_of, seconds, found.seconds / recorded, why_fixed(recording, model))


def cut_in_order(
    recording: Recording, model: nn.Module, stage_of: Mapping[str, int], cuts: Sequence[str]
) -> CutRecording:
    """The recording in this order, cut into these stages. Raises PartitionError if that is impossible.

    Args:
        cuts: what the cuts are called.
    """
    return _cut(arranged(recording, model, stage_of), model, cuts)


def _graph(finest: Arranged, model: nn.Module, units: Units) -> WorkGraph:
    works = tuple(map(Work, units.seconds, units.kept_bytes, units.held_bytes))
    ends: dict[tuple[int, str], set[int]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for unit, plan in enumerate(_cut(finest, model, units.names[1:]).plans):
        for value in plan.inputs:
            if value.source != MODEL_INPUT:
                key = value.source, value.name
                ends.setdefault(key, {value.source}).add(unit)
                sizes[key] = meta_bytes(value.meta) * (2 if value.meta.requires_grad else 1)
    transfers = (Transfer(frozenset(each), sizes[key] / units.bytes_per_second) for key, each in ends.items())
    return WorkGraph(works, tuple(finest.order), tuple(transfers))


def _cut(found: Arranged, model: nn.Module, names: Sequence[str]) -> CutRecording:
    split = CutRecording(found.recording, model, names, found.starts)
    _ = split.plans  # raises if it cannot be cut there
    return split
