"""The example batch that a pipeline is made with: one process has it; the others may give its shapes, or nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock._base.trees import flatten
from penstock.errors import ArgumentError
from penstock.partition.values.objects import input_path
from penstock.runtime.batch.microbatches import Microbatches
from penstock.runtime.batch.outline import Example, Outline
from penstock.runtime.execute.control import Control


def is_whole(example: Example) -> bool:
    """Whether a process has the example itself, rather than its shapes (tensors on the meta device) or nothing."""
    tensors = tensors_of(example)
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def tensors_of(example: Example) -> list[Tensor]:
    """The tensors of a batch, those in `Microbatches` included."""
    leaves = flatten(example).leaves
    pieces = [one for leaf in leaves if isinstance(leaf, Microbatches) for one in flatten(leaf.pieces).leaves]
    return [leaf for leaf in (*leaves, *pieces) if isinstance(leaf, Tensor)]


def shared(control: Control, example: Example) -> Example:
    """The example, from the first process that has one if this one has none. Every process calls it.

    Raises:
        ArgumentError: no process has one, or this one gave other shapes.
    """
    has = control.gather(is_whole(example), "its example")
    if all(has):
        return example
    if not any(has):
        if tensors_of(example):
            raise ArgumentError(
                "the example is on the meta device on every rank that gives one: at least the rank of the first stage "
                "has to give real tensors, since the forward may branch on the values of integers"
            )
        return example  # it has no tensors: a function of the user's makes them
    first = has.index(True)
    outlines = control.gather(Outline.of_example(example) if control.world.number == first else None, "its example")
    problem = None if is_whole(example) else _difference(example, outlines[first].examples[0], first)
    for text in control.gather(problem, "its example"):  # all raise, so that none waits for one that did
        if text is not None:
            raise ArgumentError(text)
    if is_whole(example):
        return example
    filled: list[Example] = outlines[first].fill()
    return filled[0]


def _difference(given: Example, expected: Example, first: int) -> str | None:
    mine, others = _shapes(given), _shapes(expected)
    for name, shape in mine.items():
        if others.get(name) != shape:
            there = f"is {list(others[name])}" if name in others else "is not there"
            return (
                f"example: {name} is {list(shape)} on one process, but {there} on process {first}, which gives the "
                "values; pass the same shapes, or no example where the first stage does not run"
            )
    return None


def _shapes(example: Example) -> dict[str, tuple[int, ...]]:
    flat: Any = flatten(example)
    pairs = zip(flat.leaves, flat.paths, strict=True)
    return {input_path(path): tuple(leaf.shape) for leaf, path in pairs if isinstance(leaf, Tensor)}
