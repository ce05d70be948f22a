"""A batch, cut into microbatches along its first dimension.

Every tensor of a batch (in any nesting of tuples, lists and dicts) has the batch's rows in its first dimension; scalars
and plain values go to each microbatch as they are. A batch that does not divide evenly gives microbatches whose sizes
differ by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import ArgumentError, ShapeError
from penstock.partition._compat import Flat, flatten, unflatten
from penstock.runtime import exact


def sizes_of(rows: int, microbatches: int) -> tuple[int, ...]:
    """How many rows each microbatch gets: as even as can be, the larger ones first.

    Raises:
        ArgumentError: fewer rows than microbatches.
    """
    if rows < microbatches:
        raise ArgumentError(
            f"microbatches={microbatches}, but the batch has {rows} rows; "
            "each microbatch needs at least one: give larger batches or fewer microbatches"
        )
    small, extra = divmod(rows, microbatches)
    return tuple(small + (index < extra) for index in range(microbatches))


def rows_of(tree: Any, what: str) -> int:
    """The number of rows of a batch.

    Raises:
        ShapeError: there is no tensor with rows, or two of them disagree.
    """
    found: dict[int, str] = {}
    flat = flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.dim():
            found.setdefault(leaf.shape[0], f"{what}{path} {list(leaf.shape)}")
    if not found:
        raise ShapeError(f"{what}: no tensor with rows was given; expected a batch in the first dimension of a tensor")
    if len(found) > 1:
        raise ShapeError(
            f"{what}: tensors disagree on the number of rows: {', '.join(found.values())}; "
            "each tensor must have the batch in its first dimension (scalars and plain values are repeated)"
        )
    return next(iter(found))


def split(tree: Any, sizes: tuple[int, ...], what: str, device: torch.device | None = None) -> list[Any]:
    """The microbatches of a batch, each tensor in an aligned allocation of its own on `device` (default: as it is).

    Raises:
        ShapeError: a tensor's first dimension is not the sum of `sizes`, or a tensor requires a gradient.
    """
    flat = flatten(tree)
    return [unflatten(leaves, flat.structure) for leaves in split_leaves(flat, sizes, what, device)]


def split_leaves(
    flat: Flat, sizes: tuple[int, ...], what: str, device: torch.device | None = None
) -> list[tuple[Any, ...]]:
    """As `split`, of a batch that is flattened already: the leaves of each microbatch."""
    if not flat.leaves:
        return [() for _ in sizes]
    columns = [
        _split_leaf(leaf, sizes, f"{what}{path}", device) for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    return list(zip(*columns, strict=True))


def _split_leaf(leaf: Any, sizes: tuple[int, ...], where: str, device: torch.device | None) -> list[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(sizes)
    if leaf.requires_grad:
        raise ShapeError(
            f"{where} requires a gradient, which a pipeline does not return for its inputs; pass {where}.detach()"
        )
    if leaf.dim() == 0:
        return [exact.own(leaf if device is None else leaf.to(device)) for _ in sizes]
    if leaf.shape[0] != sum(sizes):
        raise ShapeError(
            f"{where} has {leaf.shape[0]} rows (shape {list(leaf.shape)}); expected {sum(sizes)}, "
            "the rows of the batch that the pipeline was made for; pad or drop the last batch, "
            "or make a pipeline for this size"
        )
    return [exact.own(part if device is None else part.to(device)) for part in torch.split(leaf, list(sizes))]
