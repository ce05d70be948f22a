"""Cuts batches into microbatches and joins their outputs, along dimensions or by the user's functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError, ShapeError, is_integer
from penstock._base.trees import flatten, unflatten
from penstock._base.words import counted
from penstock.runtime.batch import microbatches as batches
from penstock.runtime.batch.batch_dims import BatchDims, Dim, Dims, checked, parse, plain
from penstock.runtime.batch.microbatches import CutBatch, Microbatches
from penstock.runtime.batch.outline import Example
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import outside_autocast
from penstock.schedule import MICROBATCHES


class Microbatch(NamedTuple):
    """One piece of a batch, as a `split=` function returns it.

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
        pieces: what a `split=` function made of it; None if there is no such function.
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
        unsure: those among them of numbers, which may as well belong to no row (`layers=[3, 5, 7, 11]`).
    """

    inputs: Dims
    target: Dims
    output: Dims
    split: SplitFunction | None = None
    merge: MergeFunction | None = None
    notes: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, batch_dims: BatchDims | Dim, split: SplitFunction | None = None, merge: MergeFunction | None = None
    ) -> Cutting:
        """Makes the rule from the user's arguments. Raises ArgumentError if one is invalid."""
        for name, function in {"split": split, "merge": merge}.items():
            if function is not None and not callable(function):
                raise ArgumentError(f"{name}={function!r}: expected a function, or None")
        return cls(*parse(batch_dims), split, merge)

    def check(self, example: Example) -> None:
        """Raises ArgumentError if dimensions are stated for inputs that the example does not have."""
        if self.inputs.stated and self.split is None:
            self.inputs.refuse_unknown(_paths(example))

    def cut_like(self, example: Any, rows: int) -> Cutting:
        """This rule, with lists of plain values cut in later batches if they are in this example of so many rows: a
        smaller batch may have as many rows as some list has entries by chance.
        """
        dims, stated, notes, unsure = self.inputs, list(self.inputs.stated), [], []
        flat = flatten(example, is_leaf=lambda value, path: batches.is_list(value, path, dims))
        for leaf, path in zip(flat.leaves, flat.paths, strict=True) if rows > 1 else ():
            if type(leaf) in batches.LISTS and not batches.holds_tensors(leaf):
                cut = batches.is_column(leaf, path, rows, f"example{path}", dims)
                stated.append((plain(path), 0 if cut else None))
                if not dims.states(path) and (cut or len(leaf) > 3):  # up to 3 values are a size
                    name = ("args", "kwargs")[path.startswith("[1]")] + path[3:]
                    how = f"is cut; to give all of them to each microbatch, {_ALL}"
                    how = how if cut else f"goes whole to each microbatch: the batch has {rows} rows"
                    notes.append(f"{name}, a {type(leaf).__name__} of {len(leaf)} values, {how}")
                    unsure += notes[-1:] if cut and all(type(one) in (int, float) for one in leaf) else []
        inputs = replace(dims, stated=tuple(stated))
        return replace(self, inputs=inputs, notes=tuple(notes), unsure=tuple(unsure))

    def divide(self, batch: Batch, microbatches: int, what: str, pipelines: int) -> Batch:
        """The batch with the pieces into which `split` cuts it, each with its rows.

        Raises:
            ArgumentError: it returned something other than microbatches, too many or too few, or rows that are not a
                number.
            ShapeError: it did not say how many rows a piece has, and tensors disagree.
        """
        if self.split is None:
            return batch
        found = self.split(batch.args, dict(batch.kwargs), batch.target, microbatches)
        if not isinstance(found, Sequence) or not all(isinstance(piece, Microbatch) for piece in found):
            given = type(found).__name__
            if isinstance(found, Sequence):
                given += " of " + ", ".join(sorted({type(piece).__name__ for piece in found}))
            raise ArgumentError(f"split= returned a {given}; expected a list of penstock.Microbatch")
        batches.check_count(len(found), microbatches, f"{what}, cut by split=", pipelines)
        counted = (self._counted(piece, f"{what}, microbatch {k} of split=") for k, piece in enumerate(found))
        return batch._replace(pieces=tuple(counted))

    def cut(self, batch: Batch, microbatches: int, what: str, device: torch.device | None, pipelines: int) -> CutBatch:
        """The inputs of a batch, which `divide` has returned, as microbatches on `device`."""
        if batch.pieces is None:
            inputs = batch.args, dict(batch.kwargs)
            return batches.cut(inputs, microbatches, what, device, pipelines=pipelines, dims=self.inputs)
        given = [(piece.args, dict(piece.kwargs)) for piece in batch.pieces]
        pieces = tuple(flatten(batches.split(one, (1,), what, device, _WHOLE)[0]) for one in given)
        sizes = tuple(piece.rows or 0 for piece in batch.pieces)
        return CutBatch(pieces, sizes, (sizes, tuple(map(batches.kind_of, pieces))))

    def rotated(self, batch: Microbatch, microbatches: int) -> Microbatch:
        """A batch with its rows in another order: each microbatch has those of another; a single one has its own, in
        another order."""
        inputs = (batch.args, dict(batch.kwargs))
        leaves = flatten((*inputs, batch.target)).leaves
        if self.split is not None or any(isinstance(leaf, Microbatches) or is_block_mask(leaf) for leaf in leaves):
            return batch
        rows = batches.rows_of(inputs, "batch", self.inputs)
        by = -(-rows // max(microbatches, 2))

        def moved(tree: Any, dims: Dims) -> Any:
            flat = flatten(tree, is_leaf=lambda value, path: batches.is_column(value, path, rows, path, dims))

            def one(leaf: Any, path: str) -> Any:
                if batches.is_column(leaf, path, rows, path, dims):
                    order = [*leaf][-by:] + [*leaf][:-by]
                    return tuple(order) if isinstance(leaf, tuple) else order
                if not isinstance(leaf, torch.Tensor):
                    is_cut = batches.length(leaf, path, dims) == rows
                    return sys.modules["numpy"].roll(leaf, by, dims.of(path)) if is_cut else leaf
                dim = dims.at(path, leaf, path) if leaf.layout == torch.strided else None
                if dim is None or leaf.shape[dim] != rows:
                    return leaf
                with outside_autocast(leaf.device.type):  # which casts what `roll` joins
                    return leaf.detach().roll(by, dim).requires_grad_(leaf.requires_grad)

            return unflatten([one(*pair) for pair in zip(flat.leaves, flat.paths, strict=True)], flat.structure)

        args, kwargs = moved(inputs, self.inputs)
        return Microbatch(args, kwargs, moved(batch.target, self.target), batch.rows)

    def batch(self, example: Example, count: int, what: str, pipelines: int) -> CutBatch:
        """A batch without a target as at most `count` microbatches, where it is."""
        return self.cut(self.divide(Batch(*example), count, what, pipelines), count, what, None, pipelines)

    def of_rows(self, example: Example, rows: int) -> CutBatch:
        """One microbatch of exactly that many rows, whatever the number of microbatches: the first of the batch, or the
        first one of that size that the user's own cut makes.

        Raises:
            ArgumentError: the batch is smaller, or is never cut into microbatches of this size.
            ShapeError: tensors disagree on the number of rows.
        """
        self.check(example)
        own = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
        if self.split is None and not own:
            there = batches.rows_of(example, "example", self.inputs)
            if rows > there:
                raise ArgumentError(
                    f"the batch has only {counted(there, 'row')}: pass a larger one, or microbatches of at most {there}"
                )
            sizes = (rows, there - rows) if rows < there else (rows,)
            piece = flatten(batches.split(example, sizes, "example", None, self.inputs)[0])
            return CutBatch((piece,), (rows,), None)
        count = max(own, default=1)
        if self.split is not None:
            count = max(1, sum(self.batch(example, 1, "example", 1).sizes) // rows)
        cut = self.batch(example, count, "example", 1)
        if rows not in cut.sizes:
            found = ", ".join(map(str, sorted({*cut.sizes})))
            how = "already cut into" if own else f"cut by split= into {counted(count, 'microbatch')} of"
            raise ArgumentError(f"no microbatch has {counted(rows, 'row')}: the batch is {how} {found} rows")
        place = cut.sizes.index(rows)
        return CutBatch((cut.pieces[place],), (rows,), None)

    def usual(self, example: Example) -> int:
        """How many microbatches a whole batch is cut into by default: `MICROBATCHES`, or as many as it yields (one per
        row, or the pieces that it is already cut into) if these are fewer.

        `penstock.pipeline` does not use this: it expects batches larger than its example.
        """
        given = [len(leaf) for leaf in flatten(example).leaves if isinstance(leaf, Microbatches)]
        if given:
            return max(given)
        self.check(example)
        return len(self.batch(example, MICROBATCHES, "example", 1).sizes)

    def targets(
        self, batch: Batch, sizes: Sequence[int], device: torch.device | None, labels: bool = False
    ) -> list[Any]:
        """Each microbatch's target on `device`; with `labels`, the model's own keyword input of that name.

        Raises:
            ShapeError: the target's rows differ from the inputs'.
        """
        if batch.pieces is None:
            target = batch.kwargs.get("labels") if labels else batch.target
            dims = self.inputs.below("[1]['labels']", "target") if labels else self.target
            if target is not None:
                dims.refuse_unknown(_paths(target))
            return batches.split(target, sizes, "target", device, dims)
        mine = [piece.rows for piece in batch.pieces]
        if mine != list(sizes):
            raise ShapeError(
                f"split= gave microbatches of {mine} rows where the last stage runs, and of {list(sizes)} where the "
                "first does; it must give the same on both, from what pipe.needs_inputs and pipe.needs_targets ask for"
            )
        wanted = [piece.kwargs.get("labels") if labels else piece.target for piece in batch.pieces]
        return [
            batches.split(one, (1,), f"target of microbatch {k}", device, replace(_WHOLE, what="target"))[0]
            for k, one in enumerate(wanted)
        ]

    def join(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """The output of the whole batch; see `penstock.runtime.batch.cutting.join`."""
        if self.merge is None:
            return join(outputs, sizes, self.output)
        refuse_missing(outputs)
        return self.merge(list(outputs))

    def _counted(self, piece: Microbatch, what: str) -> Microbatch:
        if not isinstance(piece.args, tuple) or not isinstance(piece.kwargs, Mapping):
            raise ArgumentError(
                f"{what}: args is a {type(piece.args).__name__} and kwargs a {type(piece.kwargs).__name__}; expected a "
                "tuple and a dict"
            )
        rows = piece.rows
        if rows is None:
            try:
                rows = batches.rows_of((piece.args, dict(piece.kwargs)), what, self.inputs)
            except ShapeError as error:
                raise ShapeError(
                    f"{what} does not say how many rows it counts for, and its inputs do not tell ({error}); return "
                    "Microbatch(..., rows=...)"
                ) from None
        if not (is_integer(rows) and rows >= 1):
            raise ArgumentError(f"{what}: rows={rows!r}; expected an integer >= 1")
        return piece._replace(rows=rows)


_ALL = "pass batch_dims= with None for it (0 says that it is cut)"
_WHOLE = Dims("piece", (("", None),))
"""Cuts nothing, but gives each tensor its own memory."""


def _paths(tree: Any) -> list[str]:
    """The paths of all leaves, including those within pieces that are already cut."""
    return [*dict.fromkeys(path for path, _ in batches.leaves_of(tree))]


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
    if not any(shapes) and not stated:
        raise ShapeError(
            f"{where} is one number for each microbatch, such as its loss, and no part of a batch: leave out what "
            f"has the model compute it, such as labels=, or {_INSTEAD}"
        )
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
