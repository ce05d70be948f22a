"""The output of the whole batch, put together from those of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._base.trees import flatten, unflatten
from penstock.errors import ArgumentError, ShapeError
from penstock.runtime.batch.batch_dims import Dim, Dims, checked
from penstock.runtime.exact import rules as exact

_FIRST = Dims("output")


def join(outputs: Sequence[Any], sizes: Sequence[int], dims: Dims = _FIRST) -> Any:
    """The output of the whole batch: the outputs of its microbatches, of `sizes` rows, put together.

    Raises:
        ArgumentError: some outputs are on another rank.
        ShapeError: a value is not a tensor with its microbatch's rows, unless it is plain and the same in all, or
            `dims` say how to combine it. Where they state a dimension for it alone, it may have other rows.
    """
    refuse_missing(outputs)
    flats = [flatten(output) for output in outputs]
    first = flats[0]
    if any(flat.structure != first.structure for flat in flats):
        raise ShapeError(f"the microbatches' outputs differ in structure, so that they cannot be combined; {_INSTEAD}")
    dims.refuse_unknown(first.paths)
    columns = zip(*(flat.leaves for flat in flats), strict=True)
    pairs = zip(columns, first.paths, strict=True)
    return unflatten(
        [_joined(column, sizes, f"output{path}", dims.of(path), bool(dims.states(path))) for column, path in pairs],
        first.structure,
    )


def refuse_missing(outputs: Sequence[Any]) -> None:
    """Raises ArgumentError if some outputs are on another rank."""
    if any(output is None for output in outputs):
        raise ArgumentError(
            "outputs=True: the schedule has two copies of the model, and this rank one's outputs alone; pass "
            "outputs='all' or a rank"
        )


_INSTEAD = (
    "state batch_dims for it ('output': its dimension; None where it is the same in all; 'mean' or 'sum'), pass "
    "merge=, or take each microbatch's own, from evaluate(..., outputs=True).outputs"
)


def _joined(column: Sequence[Any], sizes: Sequence[int], where: str, dim: Dim, stated: bool) -> Any:
    if len(column) == 1:
        return column[0]
    if not all(isinstance(value, Tensor) for value in column):
        if any(value is not column[0] and value != column[0] for value in column):
            raise ShapeError(f"{where} is not the same in all microbatches ({column[0]!r} in the first); {_INSTEAD}")
        return column[0]
    if isinstance(dim, str):
        return _reduced(column, sizes, where, dim)
    if dim is None:
        if not all(torch.equal(value, column[0]) for value in column[1:]):
            raise ShapeError(f"{where} is not the same in all microbatches, as batch_dims says; {_INSTEAD}")
        return column[0]
    shapes = [list(value.shape) for value in column]
    if dim or column[0].dim():
        dim = checked(dim, column[0], where)
    alike = all(shape[dim : dim + 1] == [size] for shape, size in zip(shapes, sizes, strict=True))
    if not (alike or (stated and all(shapes))):
        raise ShapeError(
            f"{where} has shapes {shapes} in microbatches of {list(sizes)} rows, so that they cannot be put together "
            f"to the whole batch's{f' along dimension {dim}' if dim else ''}; {_INSTEAD}"
        )
    rests = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
    if any(rest != rests[0] for rest in rests):
        raise ShapeError(f"{where} has shapes {shapes}, which do not make one tensor; {_INSTEAD}")
    return torch.cat(list(column), dim)


def _reduced(column: Sequence[Tensor], sizes: Sequence[int], where: str, how: str) -> Tensor:
    shapes = [list(value.shape) for value in column]
    if any(shape != shapes[0] for shape in shapes):
        raise ShapeError(f"{where} has shapes {shapes}, of which there is no {how}; {_INSTEAD}")
    weights = exact.seeds([float(size) for size in sizes]) if how == "mean" else [1.0] * len(sizes)
    total = column[0] * weights[0]
    for value, weight in zip(column[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
