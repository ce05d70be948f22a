"""What enters, leaves and lives on a stage: the contract between `partition`, which makes stages, and `runtime`,
which runs them. Plain values, without torch, so that schedules and predictions can be made from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MODEL_INPUT = -1
"""`Input.source` of a value that the caller of the model passes in."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, stride (both in elements), dtype (torch's name without `torch.`) and whether a gradient flows back."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a stage receives.

    Attributes:
        name: the value's name in the recorded graph; together with `source` it names one value of one version.
        source: the stage that sends it (the one that made it, or the last one that updated it in place),
            or `MODEL_INPUT`.
        meta: what was seen when the model was recorded.
        mutated: the stage updates it in place.
    """

    name: str
    source: int
    meta: TensorMeta
    mutated: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a stage returns. On the last stage these are the leaves of the model's output, in order."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class StageMeta:
    """One stage: inputs in the order of its `forward`'s arguments, outputs in the order of the tuple it returns.

    Parameters and buffers go by their names in the unsplit model. A parameter with several names goes by the first
    in `named_parameters()`, on every stage that holds it.
    """

    index: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    trainable: bool = True
    """Whether any of its parameters requires a gradient."""
    updated: tuple[str, ...] = ()
    """Buffers that the forward updates, such as batch norm's running statistics."""
    branches: bool = False
    """Whether parts of it run or not at random, for each microbatch."""


@dataclass(frozen=True, slots=True)
class Link:
    """The values of one microbatch that go together from stage `source` to stage `target`, by name.

    A forward link carries the values; a backward link carries their gradients, from a consumer back to the one
    before it and finally to the producer, which is the order in which autograd adds them.
    """

    source: int
    target: int
    values: tuple[tuple[int, str], ...]
    """Each value as (the stage that made it, its name)."""
    varies: bool = False
    """Whether strides, and which gradients exist, change from step to step, since some stage branches at random."""


def forward_links(stages: Sequence[StageMeta]) -> tuple[Link, ...]:
    """Every forward message: a value goes straight from the stage that made it to each one that uses it."""
    links = []
    for stage in stages:
        for source in sorted({i.source for i in stage.inputs if i.source != MODEL_INPUT}):
            values = tuple((source, i.name) for i in stage.inputs if i.source == source)
            links.append(Link(source, stage.index, values, _varies(stages)))
    return tuple(links)


def backward_links(stages: Sequence[StageMeta]) -> tuple[Link, ...]:
    """Every backward message: from a value's last consumer to the one before it, and so on to its producer.

    Sent straight to the producer and added there, the same terms would be added in another order than autograd's.
    """
    grouped: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for value, holders in gradient_routes(stages).items():
        for target, source in pairwise(holders):
            grouped.setdefault((source, target), []).append(value)
    varies = _varies(stages)
    return tuple(Link(source, target, tuple(values), varies) for (source, target), values in sorted(grouped.items()))


def _varies(stages: Sequence[StageMeta]) -> bool:
    return any(stage.branches for stage in stages)


def gradient_routes(stages: Sequence[StageMeta]) -> dict[tuple[int, str], tuple[int, ...]]:
    """For each value that requires a gradient: its producer, then its consumers, in order of stage."""
    routes: dict[tuple[int, str], list[int]] = {}
    for stage in stages:
        for i in stage.inputs:
            if i.source != MODEL_INPUT and i.meta.requires_grad:
                routes.setdefault((i.source, i.name), [i.source]).append(stage.index)
    return {value: tuple(holders) for value, holders in routes.items()}


def shifted(stage: StageMeta, by: int) -> StageMeta:
    """The same stage in another copy of the model, whose stages are counted from `by`."""
    inputs = tuple(i if i.source == MODEL_INPUT else replace(i, source=i.source + by) for i in stage.inputs)
    return replace(stage, index=stage.index + by, inputs=inputs)


def needs_backward(stage: StageMeta) -> bool:
    """Whether a stage has a backward at all: it holds something to train, or passes a gradient on."""
    return stage.trainable or any(i.meta.requires_grad for i in stage.inputs)


def ties(stages: Sequence[StageMeta]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold: name -> the stages, in order."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
    return {name: tuple(on) for name, on in holders.items() if len(on) > 1}


def ties_across_ranks(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> dict[tuple[int, ...], list[str]]:
    """Tied parameters that several ranks hold: their stages -> names, in the order in which every rank reduces them."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in ties.items():
        if len({rank_of[stage] for stage in stages}) > 1:
            found.setdefault(tuple(stages), []).append(name)
    return dict(sorted(found.items()))
