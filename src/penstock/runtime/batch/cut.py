"""The one rule by which every rank cuts a batch into microbatches: along dimensions, or by the user's function.

Every tensor of a batch (in any nesting that torch can flatten) has the batch's rows in its first dimension, unless
`Dims` say otherwise. A list or array with one entry per row is cut too (`is_list_of_rows`); scalars and other plain
values go to each microbatch unchanged. A batch that does not divide evenly gives microbatches whose sizes differ by
one; one with fewer rows than microbatches gives fewer of them. What the user has cut already (`Microbatches`) stays so.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError, ShapeError, is_integer
from penstock._base.pytree import Flat, flatten, map_tensors, unflatten
from penstock.partition.stages.partition import describe
from penstock.runtime.batch.batch_dims import (
    FIRST,
    BatchDims,
    Dim,
    Dims,
    Microbatches,
    check_count,
    count_rows,
    is_list_of_rows,
    iter_leaves,
    piece_sizes,
    row_count,
    split_evenly,
    suggest_microbatches,
)
from penstock.runtime.batch.merge import merge_outputs
from penstock.runtime.batch.stated_dims import parse
from penstock.runtime.exact import rules as exact

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs, of one microbatch or of a whole batch."""


class Microbatch(NamedTuple):
    """One piece of a batch, as a `split_fn=` function returns it.

    Attributes:
        args, kwargs: the model's inputs.
        target: what the loss takes; None if the batch has none.
        rows: how many rows it counts as in a mean; None: as many as its inputs have along the batch's dimension.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    target: Any = None
    rows: int | None = None


class Batch(NamedTuple):
    """A batch as it was given.

    Attributes:
        pieces: what a `split_fn=` function made of it; None if there is no such function.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    target: Any = None
    pieces: tuple[Microbatch, ...] | None = None

    @property
    def has_target(self) -> bool:
        return any(piece.target is not None for piece in self.pieces or (self,))


SplitFunction = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Sequence[Microbatch]]
"""`split(args, kwargs, target, microbatches)`: the pieces of one batch, at most `microbatches`. It is called on the
ranks of the first and the last stage, and must return the same on both. The target is None if a batch has none."""

MergeFunction = Callable[[list[Any]], Any]
"""`merge(outputs)`: makes the output of the whole batch from those of its microbatches, in order."""


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


@dataclass(frozen=True, slots=True)
class Cutting:
    """The one rule by which every rank cuts batches and puts outputs together.

    Attributes:
        inputs: the batch's dimension in the leaves of (args, kwargs).
        microbatches: the most that a batch is cut into; `pipelines`: the fewest, one for each copy of the model.
        target, output: the same for the target and the model's output.
        split, merge: see `SplitFunction` and `MergeFunction`; None: along the dimensions.
        notes: which lists of plain values are cut.
        ambiguous: those among them of numbers, which may as well belong to no row (`layers=[3, 5, 7, 11]`).
    """

    inputs: Dims
    target: Dims
    output: Dims
    split: SplitFunction | None = None
    merge: MergeFunction | None = None
    notes: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    microbatches: int = 1
    pipelines: int = 1

    @classmethod
    def of(
        cls, batch_dims: BatchDims | Dim, split_fn: SplitFunction | None = None, merge_fn: MergeFunction | None = None
    ) -> Cutting:
        """Make the rule from the user's arguments. Raise ArgumentError if one is invalid."""
        for name, function in {"split_fn": split_fn, "merge_fn": merge_fn}.items():
            if function is not None and not callable(function):
                raise ArgumentError(f"{name}={function!r}: expected a function, or None")
        return cls(*parse(batch_dims), split_fn, merge_fn)

    def into(self, microbatches: int, pipelines: int = 1) -> Cutting:
        """Return this rule for other numbers of microbatches and copies of the model."""
        return replace(self, microbatches=microbatches, pipelines=pipelines)

    def in_pairs(self) -> Cutting:
        """Return this rule, with fewer microbatches, if need be, so that none has a single row."""
        return replace(self, inputs=replace(self.inputs, min_rows=2))

    def check(self, example: Example) -> None:
        """Raise ArgumentError if dimensions are stated for inputs that the example does not have."""
        if self.inputs.stated and self.split is None:
            self.inputs.check_paths(_paths(example))

    def divide(self, batch: Batch, label: str) -> Batch:
        """Return the batch with the pieces into which `split` cuts it, each with its rows.

        Raises:
            ArgumentError: it returned something other than microbatches, too many or too few, or rows that are not a
                number.
            ShapeError: a piece has no `rows`, and its tensors disagree on their number.
        """
        if self.split is None:
            return batch
        pieces = self.split(batch.args, dict(batch.kwargs), batch.target, self.microbatches)
        if not isinstance(pieces, Sequence) or not all(isinstance(piece, Microbatch) for piece in pieces):
            returned = type(pieces).__name__
            if isinstance(pieces, Sequence):
                returned += " of " + ", ".join(sorted({type(piece).__name__ for piece in pieces}))
            raise ArgumentError(f"split_fn= returned a {returned}; expected a list of penstock.Microbatch")
        check_count(len(pieces), self.microbatches, f"{label}, cut by split_fn=", self.pipelines)
        with_rows = (self._with_rows(piece, f"{label}, microbatch {k} of split_fn=") for k, piece in enumerate(pieces))
        return batch._replace(pieces=tuple(with_rows))

    def cut(self, batch: Batch, label: str) -> CutBatch:
        """Cut the inputs of a batch, which `divide` has returned, into microbatches, where they are."""
        if batch.pieces is None:
            inputs = batch.args, dict(batch.kwargs)
            return cut_along_dims(inputs, self.microbatches, label, pipelines=self.pipelines, dims=self.inputs)
        examples = [(piece.args, dict(piece.kwargs)) for piece in batch.pieces]
        pieces = tuple(flatten(cut_by_sizes(example, (1,), label, UNCUT)[0]) for example in examples)
        sizes = tuple(piece.rows or 0 for piece in batch.pieces)
        return CutBatch(pieces, sizes, (sizes, tuple(map(input_signature, pieces))))

    def cut_example(self, example: Example, label: str = "example") -> CutBatch:
        """Cut a batch without a target, where it is. Raise ArgumentError if dimensions are stated for inputs that it
        does not have."""
        self.check(example)
        return self.cut(self.divide(Batch(*example), label), label)

    def targets(self, batch: Batch, sizes: Sequence[int], labels: bool = False) -> list[Any]:
        """Return each microbatch's target, where it is. `labels`: the model's own keyword input of that name.

        Raises:
            ShapeError: the target's rows differ from the inputs'.
        """
        if batch.pieces is None:
            target = batch.kwargs.get("labels") if labels else batch.target
            dims = self.inputs.subtree("[1]['labels']", "target") if labels else self.target
            if target is not None:
                dims.check_paths(_paths(target))
            return cut_by_sizes(target, sizes, "target", dims)
        rows = [piece.rows for piece in batch.pieces]
        if rows != list(sizes):
            raise ShapeError(
                f"split_fn= gave microbatches of {rows} rows where the last stage runs, and of {list(sizes)} where the "
                "first does; it must give the same on both, from what pipe.needs_inputs and pipe.needs_targets ask for"
            )
        piece_targets = [piece.kwargs.get("labels") if labels else piece.target for piece in batch.pieces]
        return [
            cut_by_sizes(piece_target, (1,), f"target of microbatch {k}", replace(UNCUT, label="target"))[0]
            for k, piece_target in enumerate(piece_targets)
        ]

    def merge_outputs(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """The output of the whole batch; see `merge_outputs`. Raise ArgumentError if some are on another rank."""
        if any(output is None for output in outputs):
            raise ArgumentError(
                "outputs=True: the schedule has two copies of the model, and this rank one's outputs alone; pass "
                "outputs='all' or a rank"
            )
        return merge_outputs(outputs, sizes, self.output) if self.merge is None else self.merge(list(outputs))

    def _with_rows(self, piece: Microbatch, label: str) -> Microbatch:
        if not isinstance(piece.args, tuple) or not isinstance(piece.kwargs, Mapping):
            raise ArgumentError(
                f"{label}: args is a {type(piece.args).__name__} and kwargs a {type(piece.kwargs).__name__}; expected "
                "a tuple and a dict"
            )
        rows = piece.rows
        if rows is None:
            try:
                rows = count_rows((piece.args, dict(piece.kwargs)), label, self.inputs)
            except ShapeError as error:
                raise ShapeError(
                    f"{label} has no rows=, and its inputs do not determine it ({error}); return "
                    "Microbatch(..., rows=...)"
                ) from None
        if not (is_integer(rows) and rows >= 1):
            raise ArgumentError(f"{label}: rows={rows!r}; expected an integer >= 1")
        return piece._replace(rows=rows)


UNCUT = Dims("piece", (("", None),))
"""Cuts nothing, but gives each tensor its own memory."""


def _paths(tree: Any) -> list[str]:
    """Return the paths of all leaves, including those within pieces that are already cut."""
    return [*dict.fromkeys(path for path, _ in iter_leaves(tree))]


def cut_along_dims(tree: Any, microbatches: int, label: str, *, pipelines: int = 1, dims: Dims = FIRST) -> CutBatch:
    """Cut a batch into at most `microbatches` microbatches, each tensor in its own aligned allocation, where it is.

    Raises:
        ArgumentError: more pieces were given than microbatches, or fewer rows or pieces than pipelines.
        ShapeError: tensors disagree on the number of rows, or one requires a gradient.
    """
    raw = flatten(tree, is_leaf=lambda value, _: is_block_mask(value))
    if has_pieces := any(isinstance(leaf, Microbatches) for leaf in raw.leaves):
        sizes = piece_sizes(raw, microbatches, label, pipelines, dims)
    else:
        sizes_for = partial(split_evenly, microbatches=microbatches, pipelines=pipelines, min_rows=dims.min_rows)
        sizes = sizes_for(count_rows(tree, label, dims, raw, sizes_for))
    flat, leaves = _split_leaves(tree, sizes, label, dims)
    if has_pieces or flat.structure != raw.structure or any(map(is_block_mask, raw.leaves)):
        pieces = [flatten(unflatten(part, flat.structure)) for part in leaves]  # structures may differ within a leaf
    else:
        pieces = [Flat(part, flat.paths, flat.structure) for part in leaves]
    return CutBatch(tuple(pieces), sizes, input_signature(raw))


def cut_by_sizes(tree: Any, sizes: Sequence[int], label: str, dims: Dims = FIRST) -> list[Any]:
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
    flat = flatten(tree, is_leaf=lambda v, path: is_block_mask(v) or is_list_of_rows(v, path, rows, label + path, dims))
    columns = [
        _split_leaf(leaf, path, sizes, f"{label}{path}", dims)
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
    ]
    return flat, [*map(list, zip(*columns, strict=True))] if columns else [[] for _ in sizes]


def _split_leaf(leaf: Any, path: str, sizes: Sequence[int], label: str, dims: Dims) -> Sequence[Any]:
    if isinstance(leaf, Microbatches):
        return _pieces(leaf, sizes, label, dims)
    if is_block_mask(leaf):
        return _cut_block_mask(leaf, sizes, label)
    ends = list(accumulate(sizes))
    if is_list_of_rows(leaf, path, ends[-1], label, dims):
        leaf = [*leaf] if type(leaf) in (range, deque) else leaf
        pieces = [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return _pieces(Microbatches(pieces), sizes, label, dims)
    if not isinstance(leaf, Tensor):
        if row_count(leaf, path, dims) != ends[-1]:
            return [leaf] * len(sizes)
        return list(sys.modules["numpy"].split(leaf, ends[:-1], dims.get(path)))
    dim = dims.cut_dim(path, leaf, label)
    if dim is None:
        return [_copy(leaf, label, dims) for _ in sizes][::-1]  # autograd adds the latest one's gradient first
    if leaf.shape[dim] != ends[-1]:
        flattened = "if its rows are [sequence, batch] flattened, set batch_dims= and flatten it in the loss; "
        raise ShapeError(
            f"{label} has {leaf.shape[dim]} rows (shape {list(leaf.shape)}{f', dimension {dim}' if dim else ''}); "
            f"expected {ends[-1]}, as the inputs have; {flattened * label.startswith('target')}"
            "if it has several for each of theirs, or one for several, "
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


def _cut_block_mask(mask: Any, sizes: Sequence[int], label: str) -> list[Any]:
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
