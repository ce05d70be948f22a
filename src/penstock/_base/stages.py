"""What enters, leaves and lives on a stage: the contract between `partition`, which makes stages, and `runtime`,
which runs them. Plain values that do not need torch, so that schedules and predictions can be made from them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MODEL_INPUT = -1
"""`Input.source` of a value that the caller of the model passes in."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's shape, stride (in elements), dtype (without the `torch.`) and whether a gradient flows back to it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a stage receives.

    Attributes:
        name: the value's name in the recorded graph; with `source` it identifies one version of one value.
        source: the stage that sends it (its producer, or the last stage to update it in place), or `MODEL_INPUT`.
        meta: as seen when the model was recorded.
        mutated: whether the stage updates it in place.
    """

    name: str
    source: int
    meta: TensorMeta
    mutated: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a stage returns. The last stage's outputs are the leaves of the model's output, in order."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class StageMeta:
    """One stage: inputs in the order of its `forward`'s arguments, outputs in the order of the tuple it returns.

    Parameters and buffers have their names in the unsplit model. A parameter with several names has the first one in
    `named_parameters()`, on every stage that holds it.
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
    """Whether it decides at random, for each microbatch, which of its parts run."""


@dataclass(frozen=True, slots=True)
class Link:
    """The values of a microbatch that travel together from stage `source` to stage `target`.

    A forward link carries values. A backward link carries their gradients, from each consumer to the previous one and
    finally to the producer: the order in which autograd adds them.
    """

    source: int
    target: int
    values: tuple[tuple[int, str], ...]
    """Each value as (producing stage, name)."""
    varies: bool = False
    """Whether strides, and which gradients exist, vary from step to step because some stage branches at random."""


def forward_links(stages: Sequence[StageMeta]) -> tuple[Link, ...]:
    """Return every forward message: a value goes straight from its producer to each stage that uses it."""
    links = []
    for stage in stages:
        for source in sorted({i.source for i in stage.inputs if i.source != MODEL_INPUT}):
            values = tuple((source, i.name) for i in stage.inputs if i.source == source)
            links.append(Link(source, stage.index, values, _varies(stages)))
    return tuple(links)


def backward_links(stages: Sequence[StageMeta]) -> tuple[Link, ...]:
    """Return every backward message: from a value's last consumer to the one before it, and so on to its producer.

    If every consumer sent its gradient straight to the producer, the terms would be added in a different order from
    autograd's.
    """
    grouped: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for value, route in gradient_routes(stages).items():
        for target, source in pairwise(route):
            grouped.setdefault((source, target), []).append(value)
    varies = _varies(stages)
    return tuple(Link(source, target, tuple(values), varies) for (source, target), values in sorted(grouped.items()))


def _varies(stages: Sequence[StageMeta]) -> bool:
    return any(stage.branches for stage in stages)


def merge_links(
    kinds: Sequence[Sequence[StageMeta]], links: Callable[[Sequence[StageMeta]], Sequence[Link]]
) -> tuple[Link, ...]:
    """Return the links of a batch whose microbatches are of several kinds, each with its own stages.

    A link carries every value that some kind sends; microbatches of other kinds send nothing in its place.

    Args:
        links: `forward_links` or `backward_links`.
    """
    first_links, *other_links = [links(stages) for stages in kinds]
    merged = {(link.source, link.target): link for link in first_links}
    for link in (link for links_of_kind in other_links for link in links_of_kind):
        earlier = merged.setdefault((link.source, link.target), link)
        values = tuple(dict.fromkeys((*earlier.values, *link.values)))
        merged[link.source, link.target] = replace(earlier, values=values, varies=earlier.varies or link.varies)
    return tuple(merged.values())


def traffic_key(stages: Sequence[StageMeta]) -> Hashable:
    """Return what distinguishes kinds of microbatches: the origin of each stage's inputs, as positions among the
    source's outputs, and which values take a gradient or are updated in place.

    Leaves out shapes, and names, which are numbered through the recording: an extra call for some size changes them.
    """
    output_index = {(stage.index, o.name): index for stage in stages for index, o in enumerate(stage.outputs)}
    return tuple(
        (
            *(
                (i.source, output_index.get((i.source, i.name), i.name), i.meta.requires_grad, i.mutated)
                for i in stage.inputs
            ),
            *(o.meta.requires_grad for o in stage.outputs),
            (stage.trainable, stage.branches),
        )
        for stage in stages
    )


def gradient_routes(stages: Sequence[StageMeta]) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return, for each value that requires a gradient, its producer, then its consumers in stage order."""
    routes: dict[tuple[int, str], list[int]] = {}
    for stage in stages:
        for i in stage.inputs:
            if i.source != MODEL_INPUT and i.meta.requires_grad:
                routes.setdefault((i.source, i.name), [i.source]).append(stage.index)
    return {value: tuple(route) for value, route in routes.items()}


def shift_stage(stage: StageMeta, offset: int) -> StageMeta:
    """Return the same stage in another copy of the model, whose stages are numbered from `offset`."""
    inputs = tuple(i if i.source == MODEL_INPUT else replace(i, source=i.source + offset) for i in stage.inputs)
    return replace(stage, index=stage.index + offset, inputs=inputs)


def needs_backward(stage: StageMeta) -> bool:
    """Whether a stage has a backward: it has parameters to train, or passes a gradient on."""
    return stage.trainable or any(i.meta.requires_grad for i in stage.inputs)


def ties(stages: Sequence[StageMeta]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold: maps each name to its stages, in order."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
    return {name: tuple(stages_with) for name, stages_with in holders.items() if len(stages_with) > 1}


def ties_across_ranks(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> dict[tuple[int, ...], list[str]]:
    """Tied parameters that several ranks hold: maps stages to names, in the order in which every rank reduces them."""
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, stages in ties.items():
        if len({rank_of[stage] for stage in stages}) > 1:
            shared.setdefault(tuple(stages), []).append(name)
    return dict(sorted(shared.items()))
