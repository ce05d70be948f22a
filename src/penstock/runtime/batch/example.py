"""What is made of an example: the rule for later batches, another batch like it, and how many microbatches it gives."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock._base.pytree import Flat, flatten, unflatten
from penstock.partition.nested import input_path
from penstock.runtime.batch.batch_dims import (
    LIST_TYPES,
    Dims,
    Microbatches,
    count_rows,
    holds_tensors,
    is_list_of_rows,
    may_be_list_of_rows,
    normalize_path,
    row_count,
)
from penstock.runtime.batch.cut import Cutting, Example, Microbatch, cut_by_sizes
from penstock.runtime.exact.rules import outside_autocast
from penstock.schedule import MICROBATCHES

_PASS_WHOLE = "pass batch_dims= with None for it (0 confirms the cut)"


def cut_like(cutting: Cutting, example: Any, rows: int) -> Cutting:
    """Return this rule, with lists cut between their entries in later batches if they are in this example of `rows`
    rows: another batch may have as many rows as some list has entries, or an entry has rows, by chance."""
    dims, stated, entries, notes, ambiguous = cutting.inputs, list(cutting.inputs.stated), [], [], []
    flat = flatten(example, is_leaf=lambda value, path: may_be_list_of_rows(value, path, dims))
    for leaf, path in zip(flat.leaves, flat.paths, strict=True) if rows > 1 else ():
        if type(leaf) in LIST_TYPES and not holds_tensors(leaf):
            cut = is_list_of_rows(leaf, path, rows, f"example{path}", dims)
            stated.append((normalize_path(path), 0 if cut else None))
            if not dims.is_stated(path) and (cut or len(leaf) > 3):  # up to 3 values are a size
                treatment = f"is cut; to give all of them to each microbatch, {_PASS_WHOLE}"
                treatment = treatment if cut else f"goes whole to each microbatch: the batch has {rows} rows"
                notes.append(f"{input_path(path)}, a {type(leaf).__name__} of {len(leaf)} values, {treatment}")
                ambiguous += notes[-1:] if cut and all(type(number) in (int, float) for number in leaf) else []
        elif type(leaf) in LIST_TYPES and is_list_of_rows(leaf, path, rows, path, dims):
            entries.append(normalize_path(path))  # each picture's objects, which may be as many as pictures
    stated += [(path, 0) for path in entries if not dims.is_stated(path)]
    inputs = replace(dims, stated=tuple(stated), entries=frozenset(entries))
    return replace(cutting, inputs=inputs, notes=tuple(notes), ambiguous=tuple(ambiguous))


def rotate(cutting: Cutting, batch: Microbatch, microbatches: int) -> Microbatch:
    """Return a batch with its rows in another order: each microbatch has those of another; a single one has its
    own, in another order."""
    inputs = (batch.args, dict(batch.kwargs))
    leaves = flatten((*inputs, batch.target)).leaves
    if cutting.split is not None or any(isinstance(leaf, Microbatches) or is_block_mask(leaf) for leaf in leaves):
        return batch
    rows = count_rows(inputs, "batch", cutting.inputs)
    offset = -(-rows // max(microbatches, 2))

    def rotate_tree(tree: Any, dims: Dims) -> Any:
        flat = flatten(tree, is_leaf=lambda value, path: is_list_of_rows(value, path, rows, path, dims))

        def rotate_leaf(leaf: Any, path: str) -> Any:
            if is_list_of_rows(leaf, path, rows, path, dims):
                order = [*leaf][-offset:] + [*leaf][:-offset]
                return tuple(order) if isinstance(leaf, tuple) else order
            if not isinstance(leaf, torch.Tensor):
                is_cut = row_count(leaf, path, dims) == rows
                return sys.modules["numpy"].roll(leaf, offset, dims.get(path)) if is_cut else leaf
            dim = dims.cut_dim(path, leaf, path)
            if dim is None or leaf.shape[dim] != rows:
                return leaf
            with outside_autocast(leaf.device.type):  # which casts what `roll` joins
                return leaf.detach().roll(offset, dim).requires_grad_(leaf.requires_grad)

        return unflatten([rotate_leaf(*pair) for pair in zip(flat.leaves, flat.paths, strict=True)], flat.structure)

    args, kwargs = rotate_tree(inputs, cutting.inputs)
    return Microbatch(args, kwargs, rotate_tree(batch.target, cutting.target), batch.rows)


def take_rows(cutting: Cutting, example: Example, rows: int) -> Flat:
    """Return one microbatch of exactly this many rows, whatever the number of microbatches: the first of the batch,
    or the first one of that size that the user's own cut makes.

    Raises:
        ArgumentError: the batch is smaller, or is never cut into microbatches of this size.
        ShapeError: tensors disagree on the number of rows.
    """
    cutting.check(example)
    piece_counts = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
    if cutting.split is None and not piece_counts:
        total = count_rows(example, "example", cutting.inputs)
        if rows > total:
            raise ArgumentError(
                f"the batch has only {pluralize(total, 'row')}: pass a larger one, or microbatches of at most {total}"
            )
        sizes = (rows, total - rows) if rows < total else (rows,)
        return flatten(cut_by_sizes(example, sizes, "example", cutting.inputs)[0])
    count = max(piece_counts, default=1)
    if cutting.split is not None:
        count = max(1, sum(cutting.into(1).cut_example(example).sizes) // rows)
    cut = cutting.into(count).cut_example(example)
    if rows not in cut.sizes:
        sizes_text = ", ".join(map(str, sorted({*cut.sizes})))
        origin = "already cut into" if piece_counts else f"cut by split_fn= into {pluralize(count, 'microbatch')} of"
        raise ArgumentError(f"no microbatch has {pluralize(rows, 'row')}: the batch is {origin} {sizes_text} rows")
    return cut.pieces[cut.sizes.index(rows)]


def default_count(cutting: Cutting, example: Example) -> int:
    """Return the default number of microbatches of a whole batch: `MICROBATCHES`, or as many as it yields (one per
    row, or the pieces that it is already cut into) if these are fewer.

    `penstock.pipeline` does not use this: it expects batches larger than its example.
    """
    piece_counts = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
    return max(piece_counts) if piece_counts else len(cutting.into(MICROBATCHES).cut_example(example).sizes)
