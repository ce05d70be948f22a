"""Tensors of one batch that lie in the same memory, where the forward updates one of them in place.

On one device the others change with it: `loss(model(x), x)` compares with what a `ReLU(inplace=True)` has made of x. In
a pipeline each has memory of its own, and often another process, so that nobody could see the update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.partition._compat import flatten, storage_of
from penstock.partition.objects import input_path
from penstock.runtime.batch import Microbatches
from penstock.runtime.cutting import Microbatch

Named = tuple[str, Tensor]
"""A tensor with its path, as a caller would write it."""


def refuse_aliases(
    overwritten: Collection[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    divided: Sequence[Microbatch] | None,
) -> None:
    """Raises ArgumentError if an input that the forward updates in place shares memory with another, or a target.

    Args:
        overwritten: the paths of such inputs.
        divided: what the user's function has made of the batch; None where there is no such function.
    """
    if not overwritten:
        return
    for piece in [Microbatch(args, kwargs, target)] if divided is None else divided:
        inputs = [(input_path(path), tensor) for path, tensor in _tensors((piece.args, dict(piece.kwargs)))]
        others = [*inputs, *((f"target{path}", tensor) for path, tensor in _tensors(piece.target))]
        for path, tensor in inputs:
            if path not in overwritten:
                continue
            for other, beside in others:
                if other != path and _share_memory(tensor, beside):
                    raise ArgumentError(
                        f"the forward updates input {path} in place, and {other} shares memory with it: on one device "
                        f"{other} would change as well, but in a pipeline each has memory of its own. Pass a clone "
                        "as one of the two (x.clone()), or have the model not update its input in place"
                    )


def _tensors(tree: Any) -> Iterator[Named]:
    """The tensors of a batch, those within its pieces under the path that they have in every microbatch."""
    flat = flatten(tree)
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if isinstance(leaf, Tensor):
            yield path, leaf
        elif isinstance(leaf, Microbatches):
            for piece in leaf.pieces:
                yield from ((path + inner, tensor) for inner, tensor in _tensors(piece))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether any element of the one lies where one of the other does. Columns of one tensor do not overlap."""
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided:
        return storage_of(one) == storage_of(other)
    if one.device != other.device or one.is_meta or not (one.numel() and other.numel()):
        return False
    first, second = _addresses(one), _addresses(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    start = min(first.start, second.start)
    touched = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.bool)
    _bytes(touched, one, first.start - start).fill_(True)
    return bool(_bytes(touched, other, second.start - start).any())


def _addresses(tensor: Tensor) -> range:
    """From the first byte of a tensor to its last; a tensor's strides are never negative."""
    last = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize)


def _bytes(memory: Tensor, tensor: Tensor, start: int) -> Tensor:
    """Of a memory with one element for each byte, those of a tensor."""
    size = tensor.itemsize
    strides = [step * size for step in tensor.stride()]
    return torch.as_strided(memory, (*tensor.shape, size), (*strides, 1), start)
