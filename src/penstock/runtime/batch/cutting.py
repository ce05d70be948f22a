"""Cuts batches into microbatches and joins their outputs, along dimensions or by the user's functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError, ShapeError, is_integer
from penstock._base.formatting import pluralize
from penstock._base.memory import overlap
from penstock._base.pytree import Flat, flatten, unflatten
from penstock.partition.nested import input_path
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.batch.batch_dims import (
    LIST_TYPES,
    BatchDims,
    Dim,
    Dims,
    Microbatches,
    count_rows,
    holds_tensors,
    is_column,
    iter_leaves,
    length,
    may_be_column,
    normalize_path,
    parse,
)
from penstock.runtime.batch.microbatches import CutBatch
from penstock.runtime.batch.outline import Example
from penstock.runtime.exact.rules import outside_autocast
from penstock.schedule import MICROBATCHES


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


@dataclass(frozen=True, slots=True)
class Cutting:
    """The one rule by which every rank cuts batches and puts outputs together.

    Attributes:
        inputs: the batch's dimension in the leaves of (args, kwargs).
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

    @classmethod
    def of(
        cls, batch_dims: BatchDims | Dim, split_fn: SplitFunction | None = None, merge_fn: MergeFunction | None = None
    ) -> Cutting:
        """Make the rule from the user's arguments. Raise ArgumentError if one is invalid."""
        for name, function in {"split_fn": split_fn, "merge_fn": merge_fn}.items():
            if function is not None and not callable(function):
                raise ArgumentError(f"{name}={function!r}: expected a function, or None")
        return cls(*parse(batch_dims), split_fn, merge_fn)

    def check(self, example: Example) -> None:
        """Raise ArgumentError if dimensions are stated for inputs that the example does not have."""
        if self.inputs.stated and self.split is None:
            self.inputs.check_paths(_paths(example))

    def cut_like(self, example: Any, rows: int) -> Cutting:
        """Return this rule, with lists cut between their entries in later batches if they are in this example of `rows`
        rows: another batch may have as many rows as some list has entries, or an entry has rows, by chance."""
        dims, stated, entries, notes, ambiguous = self.inputs, list(self.inputs.stated), [], [], []
        flat = flatten(example, is_leaf=lambda value, path: may_be_column(value, path, dims))
        for leaf, path in zip(flat.leaves, flat.paths, strict=True) if rows > 1 else ():
            if type(leaf) in LIST_TYPES and not holds_tensors(leaf):
                cut = is_column(leaf, path, rows, f"example{path}", dims)
                stated.append((normalize_path(path), 0 if cut else None))
                if not dims.is_stated(path) and (cut or len(leaf) > 3):  # up to 3 values are a size
                    treatment = f"is cut; to give all of them to each microbatch, {_PASS_WHOLE}"
                    treatment = treatment if cut else f"goes whole to each microbatch: the batch has {rows} rows"
                    notes.append(f"{input_path(path)}, a {type(leaf).__name__} of {len(leaf)} values, {treatment}")
                    ambiguous += notes[-1:] if cut and all(type(number) in (int, float) for number in leaf) else []
            elif type(leaf) in LIST_TYPES and is_column(leaf, path, rows, path, dims):
                entries.append(normalize_path(path))  # each picture's objects, which may be as many as pictures
        stated += [(path, 0) for path in entries if not dims.is_stated(path)]
        inputs = replace(dims, stated=tuple(stated), entries=frozenset(entries))
        return replace(self, inputs=inputs, notes=tuple(notes), ambiguous=tuple(ambiguous))

    def divide(self, batch: Batch, microbatches: int, label: str, pipelines: int) -> Batch:
        """Return the batch with the pieces into which `split` cuts it, each with its rows.

        Raises:
            ArgumentError: it returned something other than microbatches, too many or too few, or rows that are not a
                number.
            ShapeError: a piece has no `rows`, and its tensors disagree on their number.
        """
        if self.split is None:
            return batch
        pieces = self.split(batch.args, dict(batch.kwargs), batch.target, microbatches)
        if not isinstance(pieces, Sequence) or not all(isinstance(piece, Microbatch) for piece in pieces):
            returned = type(pieces).__name__
            if isinstance(pieces, Sequence):
                returned += " of " + ", ".join(sorted({type(piece).__name__ for piece in pieces}))
            raise ArgumentError(f"split_fn= returned a {returned}; expected a list of penstock.Microbatch")
        batches.check_count(len(pieces), microbatches, f"{label}, cut by split_fn=", pipelines)
        with_rows = (self._with_rows(piece, f"{label}, microbatch {k} of split_fn=") for k, piece in enumerate(pieces))
        return batch._replace(pieces=tuple(with_rows))

    def cut(self, batch: Batch, microbatches: int, label: str, device: torch.device | None, pipelines: int) -> CutBatch:
        """Cut the inputs of a batch, which `divide` has returned, into microbatches on `device`."""
        if batch.pieces is None:
            inputs = batch.args, dict(batch.kwargs)
            return batches.cut(inputs, microbatches, label, device, pipelines=pipelines, dims=self.inputs)
        examples = [(piece.args, dict(piece.kwargs)) for piece in batch.pieces]
        pieces = tuple(flatten(batches.split(example, (1,), label, device, UNCUT)[0]) for example in examples)
        sizes = tuple(piece.rows or 0 for piece in batch.pieces)
        return CutBatch(pieces, sizes, (sizes, tuple(map(batches.input_signature, pieces))))

    def rotate(self, batch: Microbatch, microbatches: int) -> Microbatch:
        """Return a batch with its rows in another order: each microbatch has those of another; a single one has its
        own, in another order."""
        inputs = (batch.args, dict(batch.kwargs))
        leaves = flatten((*inputs, batch.target)).leaves
        if self.split is not None or any(isinstance(leaf, Microbatches) or is_block_mask(leaf) for leaf in leaves):
            return batch
        rows = count_rows(inputs, "batch", self.inputs)
        offset = -(-rows // max(microbatches, 2))

        def rotate_tree(tree: Any, dims: Dims) -> Any:
            flat = flatten(tree, is_leaf=lambda value, path: is_column(value, path, rows, path, dims))

            def rotate_leaf(leaf: Any, path: str) -> Any:
                if is_column(leaf, path, rows, path, dims):
                    order = [*leaf][-offset:] + [*leaf][:-offset]
                    return tuple(order) if isinstance(leaf, tuple) else order
                if not isinstance(leaf, torch.Tensor):
                    is_cut = length(leaf, path, dims) == rows
                    return sys.modules["numpy"].roll(leaf, offset, dims.get(path)) if is_cut else leaf
                dim = dims.cut_dim(path, leaf, path)
                if dim is None or leaf.shape[dim] != rows:
                    return leaf
                with outside_autocast(leaf.device.type):  # which casts what `roll` joins
                    return leaf.detach().roll(offset, dim).requires_grad_(leaf.requires_grad)

            return unflatten([rotate_leaf(*pair) for pair in zip(flat.leaves, flat.paths, strict=True)], flat.structure)

        args, kwargs = rotate_tree(inputs, self.inputs)
        return Microbatch(args, kwargs, rotate_tree(batch.target, self.target), batch.rows)

    def batch(self, example: Example, count: int, label: str, pipelines: int) -> CutBatch:
        """Cut a batch without a target into at most `count` microbatches, where it is."""
        return self.cut(self.divide(Batch(*example), count, label, pipelines), count, label, None, pipelines)

    def take_rows(self, example: Example, rows: int) -> Flat:
        """Return one microbatch of exactly this many rows, whatever the number of microbatches: the first of the batch,
        or the first one of that size that the user's own cut makes.

        Raises:
            ArgumentError: the batch is smaller, or is never cut into microbatches of this size.
            ShapeError: tensors disagree on the number of rows.
        """
        self.check(example)
        piece_counts = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
        if self.split is None and not piece_counts:
            total = count_rows(example, "example", self.inputs)
            if rows > total:
                raise ArgumentError(
                    f"the batch has only {pluralize(total, 'row')}: pass a larger one, or microbatches of at most "
                    f"{total}"
                )
            sizes = (rows, total - rows) if rows < total else (rows,)
            return flatten(batches.split(example, sizes, "example", None, self.inputs)[0])
        count = max(piece_counts, default=1)
        if self.split is not None:
            count = max(1, sum(self.batch(example, 1, "example", 1).sizes) // rows)
        cut = self.batch(example, count, "example", 1)
        if rows not in cut.sizes:
            sizes_text = ", ".join(map(str, sorted({*cut.sizes})))
            origin = (
                "already cut into" if piece_counts else f"cut by split_fn= into {pluralize(count, 'microbatch')} of"
            )
            raise ArgumentError(f"no microbatch has {pluralize(rows, 'row')}: the batch is {origin} {sizes_text} rows")
        return cut.pieces[cut.sizes.index(rows)]

    def default_count(self, example: Example) -> int:
        """Return the default number of microbatches of a whole batch: `MICROBATCHES`, or as many as it yields (one per
        row, or the pieces that it is already cut into) if these are fewer.

        `penstock.pipeline` does not use this: it expects batches larger than its example.
        """
        piece_counts = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
        if piece_counts:
            return max(piece_counts)
        self.check(example)
        return len(self.batch(example, MICROBATCHES, "example", 1).sizes)

    def targets(
        self, batch: Batch, sizes: Sequence[int], device: torch.device | None, labels: bool = False
    ) -> list[Any]:
        """Return each microbatch's target on `device`. `labels`: the model's own keyword input of that name.

        Raises:
            ShapeError: the target's rows differ from the inputs'.
        """
        if batch.pieces is None:
            target = batch.kwargs.get("labels") if labels else batch.target
            dims = self.inputs.subtree("[1]['labels']", "target") if labels else self.target
            if target is not None:
                dims.check_paths(_paths(target))
            return batches.split(target, sizes, "target", device, dims)
        rows = [piece.rows for piece in batch.pieces]
        if rows != list(sizes):
            raise ShapeError(
                f"split_fn= gave microbatches of {rows} rows where the last stage runs, and of {list(sizes)} where the "
                "first does; it must give the same on both, from what pipe.needs_inputs and pipe.needs_targets ask for"
            )
        piece_targets = [piece.kwargs.get("labels") if labels else piece.target for piece in batch.pieces]
        return [
            batches.split(piece_target, (1,), f"target of microbatch {k}", device, replace(UNCUT, label="target"))[0]
            for k, piece_target in enumerate(piece_targets)
        ]

    def join(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """The output of the whole batch; see `microbatches.join`. Raise ArgumentError if some are on another rank."""
        if any(output is None for output in outputs):
            raise ArgumentError(
                "outputs=True: the schedule has two copies of the model, and this rank one's outputs alone; pass "
                "outputs='all' or a rank"
            )
        return batches.join(outputs, sizes, self.output) if self.merge is None else self.merge(list(outputs))

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


_PASS_WHOLE = "pass batch_dims= with None for it (0 confirms the cut)"
UNCUT = Dims("piece", (("", None),))
"""Cuts nothing, but gives each tensor its own memory."""


def _paths(tree: Any) -> list[str]:
    """Return the paths of all leaves, including those within pieces that are already cut."""
    return [*dict.fromkeys(path for path, _ in iter_leaves(tree))]


def check_aliases(overwritten: Collection[str], batch: Batch) -> None:
    """Raise ArgumentError if an input that the forward updates in place shares memory with another input or a target.

    On one device the others change with it: `loss(model(x), x)` compares with what a `ReLU(inplace=True)` made of x. In
    a pipeline each has its own memory, often in another process, and would not see the update.

    If the batch comes in pieces, this includes the inputs of other microbatches.

    `overwritten`: the paths of the inputs that the forward updates in place.
    """
    if not overwritten:
        return
    inputs: list[tuple[str, Tensor]] = []  # by their paths, as a caller would write them
    targets: list[tuple[str, Tensor]] = []
    for piece in batch.pieces or [batch]:
        input_leaves = iter_leaves((piece.args, dict(piece.kwargs)))
        inputs += [(input_path(path), leaf) for path, leaf in input_leaves if isinstance(leaf, Tensor)]
        targets += [(f"target{path}", leaf) for path, leaf in iter_leaves(piece.target) if isinstance(leaf, Tensor)]
    for index, (path, tensor) in enumerate(inputs):
        if path not in overwritten:
            continue
        candidates = [*inputs[:index], *inputs[index + 1 :], *targets]
        alias = next((name for name, candidate in candidates if overlap(tensor, candidate)), None)
        if alias is not None:
            text = f"{alias} of another microbatch" if alias == path else alias
            raise ArgumentError(
                f"the forward updates input {path} in place, and {text} shares memory with it: on one device {text} "
                "would change as well, but in a pipeline each has memory of its own. Pass a clone as one of the two "
                "(x.clone()), or have the model not update its input in place"
            )
