"""A batch, cut into microbatches along its first dimension or other stated ones, or already cut by the user; and their
outputs, put together.

Every tensor of a batch (in any nesting that torch can flatten) has the batch's rows in its first dimension, unless
`Dims` say otherwise. A list or array with one entry per row is cut too (`is_column`); scalars and other plain values go
to each microbatch unchanged. A batch that does not divide evenly gives microbatches whose sizes differ by one; one with
fewer rows than microbatches gives fewer of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError, ShapeError
from penstock._base.formatting import pluralize
from penstock._base.pytree import Flat, flatten, map_tensors, unflatten
from penstock.partition.stages.partition import describe
from penstock.runtime.batch.batch_dims import (
    FIRST,
    Dim,
    Dims,
    Microbatches,
    check_dim,
    count_rows,
    is_column,
    length,
    suggest_microbatches,
    tensor_rows,
)
from penstock.runtime.exact import rules as exact


@dataclass(frozen=True, slots=True, eq=False)
class CutBatch:
    """The inputs of one batch as microbatches.

    Attributes:
        pieces: the flattened (args, kwargs) of each microbatch, its tensors in their own memory.
        sizes: the rows of each microbatch.
        signature: all that a recording depends on, except tensors' values: batches of one kind may share a recording.
    """

    pieces: tuple[Flat, ...]
    sizes: tuple[int, ...]
    signature: Hashable


def split_evenly(rows: int, microbatches: int, pipelines: int = 1, min_rows: int = 1) -> tuple[int, ...]:
    """Return how many rows each microbatch gets: as evenly as possible, larger ones first.

    With too few rows for `min_rows` in each of the microbatches there are fewer of these.

    Raises:
        ArgumentError: there are fewer rows than pipelines (copies of the model), each of which needs one.
    """
    if rows < pipelines:
        raise ArgumentError(
            f"the batch has {pluralize(rows, 'row')}, but the schedule needs at least {pipelines}: one for each copy "
            "of the model"
            if pipelines > 1
            else "the batch has no rows; expected at least one"
        )
    microbatches = max(min(rows // min_rows, microbatches), pipelines)
    small, extra = divmod(rows, microbatches)
    return tuple(small + (index < extra) for index in range(microbatches))


def cut(tree: Any, microbatches: int, label: str, *, pipelines: int = 1, dims: Dims = FIRST) -> CutBatch:
    """Cut a batch into at most `microbatches` microbatches, each tensor in its own aligned allocation, where it is.

    Raises:
        ArgumentError: more pieces were given than microbatches, or fewer rows or pieces than pipelines.
        ShapeError: tensors disagree on the number of rows, or one requires a gradient.
    """
    raw = flatten(tree, is_leaf=lambda value, _: is_block_mask(value))
    if has_pieces := any(isinstance(leaf, Microbatches) for leaf in raw.leaves):
        sizes = _piece_sizes(raw, microbatches, label, pipelines, dims)
    else:
        sizes_for = partial(split_evenly, microbatches=microbatches, pipelines=pipelines, min_rows=dims.min_rows)
        sizes = sizes_for(count_rows(tree, label, dims, raw, sizes_for))
    flat, leaves = _split_leaves(tree, sizes, label, dims)
    if has_pieces or flat.structure != raw.structure or any(map(is_block_mask, raw.leaves)):
        pieces = [flatten(unflatten(part, flat.structure)) for part in leaves]  # structures may differ within a leaf
    else:
        pieces = [Flat(part, flat.paths, flat.structure) for part in leaves]
    return CutBatch(tuple(pieces), sizes, input_signature(raw))


def split(tree: Any, sizes: Sequence[int], label: str, dims: Dims = FIRST) -> list[Any]:
    """Split a batch into microbatches, each tensor in its own aligned allocation, where it is.

    Raises:
        ShapeError: a tensor's rows are not the sum of `sizes`, a tensor requires a gradient, or something already cut
            has another number of pieces.
    """
    flat, pieces = _split_leaves(tree, sizes, label, dims)
    return [unflatten(leaves, flat.structure) for leaves in pieces]


def _split_leaves(tree: Any, sizes: Sequence[int], label: str, dims: Dims) -> tuple[Flat, list[list[Any]]]:
    """The batch, flattened, and the leaves of each piece; what `Microbatches` and columns become there is not flat."""
    rows = sum(sizes)
    flat = flatten(tree, is_leaf=lambda v, path: is_block_mask(v) or is_column(v, path, rows, label + path, dims))
    columns = [
        _split_leaf(leaf, path, sizes, f"{label}{path}", dims)
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
    ]
    return flat, [*map(list, zip(*columns, strict=True))] if columns else [[] for _ in sizes]


def _split_leaf(leaf: Any, path: str, sizes: Sequence[int], label: str, dims: Dims) -> Sequence[Any]:
    if isinstance(leaf, Microbatches):
        return _pieces(leaf, sizes, label, dims)
    if is_block_mask(leaf):
        return _cut_mask(leaf, sizes, label)
    ends = list(accumulate(sizes))
    if is_column(leaf, path, ends[-1], label, dims):
        leaf = [*leaf] if type(leaf) in (range, deque) else leaf
        pieces = [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return _pieces(Microbatches(pieces), sizes, label, dims)
    if not isinstance(leaf, Tensor):
        if length(leaf, path, dims) != ends[-1]:
            return [leaf] * len(sizes)
        return list(sys.modules["numpy"].split(leaf, ends[:-1], dims.get(path)))
    dim = dims.cut_dim(path, leaf, label)
    if dim is None:
        return [_copy(leaf, label, dims) for _ in sizes][::-1]  # autograd adds the latest one's gradient first
    if leaf.shape[dim] != ends[-1]:
        raise ShapeError(
            f"{label} has {leaf.shape[dim]} rows (shape {list(leaf.shape)}{f', dimension {dim}' if dim else ''}); "
            f"expected {ends[-1]}, as the inputs have; if it has several for each of theirs, or one for several, "
            f"{suggest_microbatches(leaf.shape[dim], sizes, dim)} to pass it whole to each microbatch, set "
            "batch_dims= to None for it; what no dimension describes (graphs, packed sequences), cut with split_fn="
        )
    if not dim and not leaf.requires_grad and (parts := exact.copy_parts_aligned(leaf, sizes)) is not None:
        return parts
    return [_copy(_dense(part) if dim else part, label, dims) for part in torch.split(leaf, list(sizes), dim)]


def _dense(part: Tensor) -> Tensor:
    """Remove the gaps that cutting along a later dimension leaves: the result is laid out like `part.clone()`."""
    return part if exact.is_dense(tuple(part.shape), part.stride()) else part.clone()


def _pieces(leaf: Microbatches, sizes: Sequence[int], label: str, dims: Dims) -> list[Any]:
    if len(leaf) != len(sizes):
        raise ShapeError(f"{label} has {len(leaf)} pieces; expected {len(sizes)}, the number of microbatches")
    return [map_tensors(lambda tensor: _copy(tensor, label, dims), piece) for piece in leaf.pieces]


def move_to(tree: Any, device: torch.device | None) -> Any:
    """Move a microbatch's tensors, which it owns, to a device; None leaves them where they are.

    Copies from the host do not wait for the device.
    """

    def move(tensor: Tensor) -> Tensor:
        if device is None or tensor.device == device:
            return tensor
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=tensor.device.type == "cpu")

    if device is None or (isinstance(tree, Tensor) and tree.device == device):
        return tree
    return map_tensors(move, tree)


def _copy(tensor: Tensor, label: str, dims: Dims) -> Tensor:
    if not tensor.requires_grad:
        return exact.copy_aligned(tensor)
    if dims.label == "target":
        raise ShapeError(
            f"{label} requires a gradient, which a pipeline returns for the model's inputs alone; pass {label}.detach()"
        )
    copied: Tensor = exact.CopyAligned.apply(tensor)  # type: ignore[no-untyped-call]
    return copied


def _piece_sizes(raw: Flat, microbatches: int, label: str, pipelines: int, dims: Dims) -> tuple[int, ...]:
    """Return the rows of each microbatch of a batch that is already cut: those of the first tensor in its piece, unless
    tensors beside it have another number, and are cut evenly."""
    divided = [pair for pair in zip(raw.leaves, raw.paths, strict=True) if isinstance(pair[0], Microbatches)]
    lengths = sorted({len(leaf) for leaf, _ in divided})
    if len(lengths) > 1:
        raise ShapeError(
            f"{label}: one Microbatches has {lengths[0]} pieces, another {lengths[-1]}; pass the same number in all"
        )
    check_count(lengths[0], microbatches, label, pipelines)
    pieces = [[flatten(leaf.pieces[k]) for leaf, _ in divided] for k in range(lengths[0])]
    rows = [
        [n for flat, (_, path) in zip(flats, divided, strict=True) for n, _ in tensor_rows(flat, label, dims, path)]
        for flats in pieces
    ]
    sizes = tuple(numbers[0] if numbers else 1 for numbers in rows)
    other_rows = {n for n, _ in tensor_rows(raw, label, dims)}
    return sizes if other_rows <= {sum(sizes)} else split_evenly(min(other_rows), lengths[0])


def check_count(count: int, microbatches: int, label: str, pipelines: int) -> None:
    """Raise ArgumentError if no schedule for `microbatches` can run this number of pieces."""
    if not pipelines <= count <= microbatches:
        raise ArgumentError(
            f"{label}: {pluralize(count, 'microbatch')} were given, but the schedule is for {microbatches}"
            + (f", and needs at least {pipelines}" if pipelines > 1 else "")
            + "; pass at most as many, or make the pipeline with a larger microbatches="
        )


def input_signature(flat: Flat) -> Hashable:
    """Return what a recording depends on, except tensors' values."""
    return flat.structure, tuple(map(_leaf_signature, flat.leaves))


def _leaf_signature(leaf: Any) -> Hashable:
    """Return a leaf as `describe` sees it, but without its device: microbatches are moved to the first stage's
    device."""
    if isinstance(leaf, Microbatches):
        return tuple(input_signature(flatten(piece)) for piece in leaf.pieces)
    if is_block_mask(leaf):
        return input_signature(flatten(leaf))
    takes_gradient = isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()
    return *describe(leaf)[:4], takes_gradient


def _cut_mask(mask: Any, sizes: Sequence[int], label: str) -> list[Any]:
    """The pieces of a block mask of FlexAttention; one for every sample goes whole to each microbatch. Its function is
    called with a sample's number in the batch, which has to go on counting in a microbatch.

    Raises:
        ShapeError: it is for another number of samples.
    """
    rows = mask.kv_num_blocks.shape[0]
    if rows == 1:
        return [mask] * len(sizes)
    if rows != sum(sizes):
        raise ShapeError(
            f"{label} is a BlockMask for {rows} rows; expected {sum(sizes)}, as the inputs have, or one for every row: "
            "pass B=None to create_block_mask"
        )
    pieces, ends = [copy(mask) for _ in sizes], accumulate(sizes)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and len(value) == rows:
            for piece, part in zip(pieces, torch.split(value, list(sizes)), strict=True):
                setattr(piece, name, part)
    for piece, size, end in zip(pieces, sizes, ends, strict=True):
        piece.mask_mod = _shifted(mask.mask_mod, torch.tensor(end - size, device=mask.kv_num_blocks.device))
    return pieces


def _shifted(mask_mod: Callable[..., Tensor], start: Tensor) -> Callable[..., Tensor]:
    """Return a mask function for a microbatch that begins at a sample. `start` is a tensor, so that no other start
    needs a recording of its own."""

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + start.to(b.dtype), h, q, kv)

    return shifted


def join(outputs: Sequence[Any], sizes: Sequence[int], dims: Dims) -> Any:
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
