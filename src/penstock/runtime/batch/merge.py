"""The outputs of microbatches, put together to the batch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.pytree import flatten, unflatten
from penstock.runtime.batch.batch_dims import Dim, Dims, check_dim
from penstock.runtime.exact import rules as exact


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], dims: Dims) -> Any:
    """Join the outputs of the microbatches, of `sizes` rows, into the output of the whole batch.

    Raises:
        ShapeError: a value is not a tensor with its microbatch's rows, unless it is plain and the same in all, or
            `dims` say how to combine it. Where they state a dimension for it alone, it may have other rows.
    """
    flats = [flatten(output) for output in outputs]
    first = flats[0]
    if any(flat.structure != first.structure for flat in flats):
        raise ShapeError(f"the microbatches' outputs differ in structure, so that they cannot be combined; {_REMEDY}")
    dims.check_paths(first.paths)
    columns = zip(*(flat.leaves for flat in flats), strict=True)
    pairs = zip(columns, first.paths, strict=True)
    return unflatten(
        [_merge(column, sizes, f"output{path}", dims.get(path), bool(dims.is_stated(path))) for column, path in pairs],
        first.structure,
    )


_REMEDY = (
    "state batch_dims for it ('output': its dimension; None where it is the same in all; 'mean' or 'sum'), pass "
    "merge_fn=, or take each microbatch's own, from evaluate(..., outputs=True).outputs"
)


def _merge(column: Sequence[Any], sizes: Sequence[int], label: str, dim: Dim, stated: bool) -> Any:
    if len(column) == 1:
        return column[0]
    if not all(isinstance(value, Tensor) for value in column):
        if any(value is not column[0] and value != column[0] for value in column):
            raise ShapeError(f"{label} is not the same in all microbatches ({column[0]!r} in the first); {_REMEDY}")
        return column[0]
    if isinstance(dim, str):
        return _reduce(column, sizes, label, dim)
    if dim is None:
        if not all(torch.equal(value, column[0]) for value in column[1:]):
            raise ShapeError(f"{label} is not the same in all microbatches, as batch_dims states; {_REMEDY}")
        return column[0]
    shapes = [list(value.shape) for value in column]
    if dim or column[0].dim():
        dim = check_dim(dim, column[0], label)
    rows_match = all(shape[dim : dim + 1] == [size] for shape, size in zip(shapes, sizes, strict=True))
    if not any(shapes) and not stated:
        raise ShapeError(
            f"{label} is one number for each microbatch, such as its loss, and no part of a batch: leave out what "
            f"has the model compute it, such as labels=, or {_REMEDY}"
        )
    if not (rows_match or (stated and all(shapes))):
        raise ShapeError(
            f"{label} has shapes {shapes} in microbatches of {list(sizes)} rows, so that they cannot be put together "
            f"to the whole batch's{f' along dimension {dim}' if dim else ''}; {_REMEDY}"
        )
    other_dims = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
    if any(dims != other_dims[0] for dims in other_dims):
        raise ShapeError(f"{label} has shapes {shapes}, which do not make one tensor; {_REMEDY}")
    return torch.cat(list(column), dim)


def _reduce(column: Sequence[Tensor], sizes: Sequence[int], label: str, reduction: str) -> Tensor:
    shapes = [list(value.shape) for value in column]
    if any(shape != shapes[0] for shape in shapes):
        raise ShapeError(f"{label} has shapes {shapes}, which have no {reduction}; {_REMEDY}")
    weights = exact.seeds([float(size) for size in sizes]) if reduction == "mean" else [1.0] * len(sizes)
    total = column[0] * weights[0]
    for value, weight in zip(column[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
