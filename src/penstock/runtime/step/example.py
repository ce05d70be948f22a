"""The example batch that a pipeline is made with: one process has it; the others may give its shapes, or nothing."""

from __future__ import annotations

from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.runtime.batch.batch_dims import leaves_of
from penstock.runtime.batch.outline import Example, Outline
from penstock.runtime.execute.control import Control


def is_whole(example: Example) -> bool:
    """Whether a process has the example itself, rather than its shapes (tensors on the meta device) or nothing."""
    tensors = tensors_of(example)
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def tensors_of(example: Example) -> list[Tensor]:
    """The tensors of a batch, those in `Microbatches` included."""
    return [leaf for _, leaf in leaves_of(example) if isinstance(leaf, Tensor)]


def shared(control: Control, example: Example) -> Example:
    """The example, from the first process that has one if this one has none. Every process calls it.

    Raises:
        ArgumentError: no process has one.
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
    if is_whole(example):
        return example
    filled: list[Example] = outlines[first].fill()
    return filled[0]
