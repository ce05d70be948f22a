"""The rows and columns of the support matrix, and what is refused in which cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from penstock.schedule import Schedule, generate, split_backward

MICROBATCHES = 4
"""Of each pipeline, whose rows are a part of the batch's where there are replicas."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of schedules, with the one that stands for it."""

    name: str
    make: Callable[[int], Schedule]
    splits: bool = False
    """Whether its backward is split."""


@dataclass(frozen=True, slots=True)
class Feature:
    """What a user may ask for.

    Attributes:
        options: of `penstock.pipeline`.
        axis: the dimension of the mesh that it needs; empty if none.
        shards: how `parallelize` shards along it; empty if it is not given.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    axis: str = ""
    shards: str = ""


def _named(name: str) -> Callable[[int], Schedule]:
    return lambda ranks: generate(name, ranks, MICROBATCHES)


FAMILIES = (
    Family("fill and drain (gpipe)", _named("gpipe")),
    Family("1f1b", _named("1f1b")),
    Family("interleaved (interleaved-1f1b)", _named("interleaved-1f1b")),
    Family("V (1f1b-v)", _named("1f1b-v")),
    Family("1f1b, split", lambda ranks: split_backward(generate("1f1b", ranks, MICROBATCHES)), splits=True),
    Family("zero bubble (zb-h1)", _named("zb-h1"), splits=True),
    Family("zero bubble, V (zb-v)", _named("zb-v"), splits=True),
    Family("bidirectional (chimera)", _named("chimera")),
)

FEATURES = (
    Feature("replicas", axis="dp"),
    Feature("FSDP2", axis="dp", shards="every_block"),
    Feature("TP", axis="tp", shards="by_plan"),
    Feature("recompute stages", {"recompute": "always"}),
    Feature("recompute layers", {"recompute": 1}),
    Feature("offload", {"offload": True}),
    Feature("compile", {"compile": {"backend": "eager"}}),
    Feature("check_finite", {"check_finite": True}),
    Feature("grad_dtype", {"grad_dtype": torch.float64}),
)

BY_NAME = {feature.name: feature for feature in FEATURES}

Cell = tuple[str, ...]
"""Names: of a family and one feature, or of a family and two."""

PAIRED = ("1f1b", "zero bubble (zb-h1)")
"""The families under which features are paired: one whose backward is whole, one whose backward is split."""


def pairs() -> list[tuple[str, str]]:
    """The features that can be asked for together. (FSDP2 is a way to have replicas, and an option has one value.)"""
    every = [(one, other) for one, other in combinations(FEATURES, 2) if not one.options.keys() & other.options.keys()]
    return [(one.name, other.name) for one, other in every if (one.name, other.name) != ("replicas", "FSDP2")]


def cells() -> list[Cell]:
    """All of the matrix."""
    alone = [(family.name, feature.name) for feature in FEATURES for family in FAMILIES]
    return [*alone, *((family, *pair) for pair in pairs() for family in PAIRED)]


def sampled(cell: Cell) -> bool:
    """Whether every run of the tests tries it: one cell of each refusal, and a tenth of what works.

    Where families are rows and features columns, these are diagonals: each family has a cell that works.
    """
    family, *features = cell
    families = [each.name for each in FAMILIES] if len(features) == 1 else list(PAIRED)
    place = families.index(family) + sum(list(BY_NAME).index(feature) for feature in features)
    if refused := refusal(cell):
        return cell == next(one for one in cells() if refusal(one) == refused)
    return place % 10 == 0


def splits_nothing(cell: Cell) -> bool:
    """Whether a cell that works has a schedule that splits the backward, and nothing waits for W."""
    family = next(family for family in FAMILIES if family.name == cell[0])
    return family.splits and bool({"TP", "recompute layers"} & set(cell[1:]))


_COPIES = "parallelize= works on one copy of each stage"
_COMPILED_FRAME = "compile the blocks within parallelize instead"
_LOOKED_AT = "check_finite=True looks at every call of a stage"
_SUMMED = "adds up its gradient itself"
_LOST = "runs layers again within the stage's code"


def refusal(cell: Cell) -> str:
    """A part of the text with which a cell is refused; empty if it works."""
    family, *features = cell
    asked = set(features)
    sharded = asked & {"FSDP2", "TP"}
    if sharded and "chimera" in family:
        return _COPIES
    if {"FSDP2", "grad_dtype"} <= asked:
        return _SUMMED
    if {"compile", "check_finite"} <= asked:
        return _LOOKED_AT
    if {"compile", "recompute layers"} <= asked:
        return _LOST
    if sharded and "compile" in asked:
        return _COMPILED_FRAME
    return ""
