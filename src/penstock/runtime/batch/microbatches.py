"""A batch, cut into microbatches along its first dimension or other stated ones, or already cut by the user.

Every tensor of a batch (in any nesting that torch can flatten) has the batch's rows in its first dimension, unless
`Dims` say otherwise; scalars and plain values go to each microbatch unchanged. A batch that does not divide evenly
gives microbatches whose sizes differ by one; one with fewer rows than microbatches gives fewer of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ArgumentError, ShapeError
from penstock.partition.stages.partition import describe
from penstock.runtime.batch.batch_dims import FIRST, Dims
from penstock.runtime.exact import rules as exact
from penstock.trees import Flat, Leaf, flatten, map_tensors, unflatten
from penstock.words import counted


class Microbatches(Leaf):
    """Values that are already cut into microbatches, such as sequences in buckets, each with its own length.

    It can replace any tensor of a batch, in inputs, targets and the example: each microbatch gets its piece, which may
    be any nesting of tensors and plain values. Tensors next to it are cut into pieces with the same numbers of rows.

    Args:
        pieces: one per microbatch, in order.
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces = tuple(pieces)
        if not self.pieces:
            raise ArgumentError("Microbatches([]): expected at least one piece")

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.pieces)!r})"


@dataclass(frozen=True, slots=True, eq=False)
class CutBatch:
    """The inputs of one batch as microbatches.

    Attributes:
        pieces: the flattened (args, kwargs) of each microbatch, its tensors in their own memory.
        sizes: the rows of each microbatch.
        kind: all that a recording depends on, except tensors' values: batches of one kind may share a recording.
    """

    pieces: tuple[Flat, ...]
    sizes: tuple[int, ...]
    kind: Hashable


def check_enough(cut: CutBatch, microbatches: int, by_default: bool = False) -> None:
    """Raises ArgumentError if an example makes fewer microbatches than a schedule has. `by_default`: the user did not
    say how many.
    """
    if len(cut.sizes) < microbatches:
        raise ArgumentError(
            f"microbatches={microbatches}{' (the default)' * by_default}, but the example makes {len(cut.sizes)}, of "
            f"{counted(sum(cut.sizes), 'row')}: a later batch may be smaller, but the example must be a whole one; "
            f"give a larger one or fewer microbatches, such as microbatches={len(cut.sizes)}"
        )


def sizes_of(rows: int, microbatches: int, pipelines: int = 1) -> tuple[int, ...]:
    """How many rows each microbatch gets: as evenly as possible, larger ones first.

    With fewer rows than microbatches there are as many microbatches as rows.

    Raises:
        ArgumentError: there are fewer rows than pipelines (copies of the model), each of which needs one.
    """
    if rows < pipelines:
        raise ArgumentError(
            f"the batch has {counted(rows, 'row')}, but the schedule needs at least {pipelines}: one for each copy of "
            "the model"
            if pipelines > 1
            else "the batch has no rows; expected at least one"
        )
    microbatches = min(rows, microbatches)
    small, extra = divmod(rows, microbatches)
    return tuple(small + (index < extra) for index in range(microbatches))


def rows_of(tree: Any, what: str, dims: Dims = FIRST) -> int:
    """The number of rows of a batch.

    Raises:
        ShapeError: there is no tensor with rows, or two of them disagree.
    """
    return _agreed(_rows(flatten(tree), what, dims), what)


def _rows(flat: Flat, what: str, dims: Dims, prefix: str = "") -> Iterator[tuple[int, str]]:
    """The rows of each tensor to cut, and its name. `prefix`: the path of `flat` within what is stated."""
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Tensor):
            dim = dims.at(prefix + path, leaf, f"{what}{path}")
            if dim is not None:
                yield leaf.shape[dim], f"{what}{path} {list(leaf.shape)}" + (f" along dimension {dim}" if dim else "")


def _agreed(counted: Iterable[tuple[int, str]], what: str) -> int:
    found: dict[int, str] = {}
    for rows, name in counted:
        found.setdefault(rows, name)
    if not found:
        raise ShapeError(f"{what}: no tensor with rows was given; expected a batch in the first dimension of a tensor")
    if len(found) > 1:
        raise ShapeError(
            f"{what}: tensors disagree on the number of rows: {', '.join(found.values())}; "
            "each tensor must have the batch in its first dimension (scalars and plain values are repeated). Where it "
            "lies elsewhere, say so with batch_dims=; what no dimension describes (graphs, packed sequences), cut with "
            "a function: split="
        )
    return next(iter(found))


def cut(
    tree: Any,
    microbatches: int,
    what: str,
    device: torch.device | None = None,
    *,
    pipelines: int = 1,
    dims: Dims = FIRST,
) -> CutBatch:
    """Cuts a batch into at most `microbatches` microbatches, each tensor in its own aligned allocation on `device`.

    Raises:
        ArgumentError: more pieces were given than microbatches, or fewer rows or pieces than pipelines.
        ShapeError: tensors disagree on the number of rows, or one requires a gradient.
    """
    flat = flatten(tree)
    given = [pair for pair in zip(flat.leaves, flat.paths, strict=True) if isinstance(pair[0], Microbatches)]
    if given:
        sizes = _sizes_given(given, microbatches, what, pipelines, dims)
        pieces = tuple(map(flatten, split(tree, sizes, what, device, dims)))
    else:
        sizes = sizes_of(_agreed(_rows(flat, what, dims), what), microbatches, pipelines)
        pieces = tuple(Flat(list(p), flat.paths, flat.structure) for p in split_leaves(flat, sizes, what, device, dims))
    return CutBatch(pieces, sizes, kind_of(flat))


def split(
    tree: Any, sizes: Sequence[int], what: str, device: torch.device | None = None, dims: Dims = FIRST
) -> list[Any]:
    """The microbatches of a batch, each tensor in its own aligned allocation on `device` (default: its own device).

    Raises:
        ShapeError: a tensor's rows are not the sum of `sizes`, a tensor requires a gradient, or something already cut
            has another number of pieces.
    """
    flat = flatten(tree)
    return [unflatten(leaves, flat.structure) for leaves in split_leaves(flat, sizes, what, device, dims)]


def split_leaves(
    flat: Flat, sizes: Sequence[int], what: str, device: torch.device | None, dims: Dims
) -> list[tuple[Any, ...]]:
    """Like `split`, for a batch that is already flattened: the leaves of each microbatch."""
    if not flat.leaves:
        return [() for _ in sizes]
    columns = []
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        dim = dims.at(path, leaf, f"{what}{path}") if isinstance(leaf, Tensor) else None
        columns.append(_split_leaf(leaf, sizes, f"{what}{path}", device, dim))
    return list(zip(*columns, strict=True))


def _split_leaf(leaf: Any, sizes: Sequence[int], where: str, device: torch.device | None, dim: int | None) -> list[Any]:
    if isinstance(leaf, Microbatches):
        return _given(leaf, sizes, where, device)
    if not isinstance(leaf, Tensor):
        return [leaf] * len(sizes)
    if dim is None:
        return [_own(leaf, where, device) for _ in sizes]
    if leaf.shape[dim] != sum(sizes):
        raise ShapeError(
            f"{where} has {leaf.shape[dim]} rows (shape {list(leaf.shape)}{f', dimension {dim}' if dim else ''}); "
            f"expected {sum(sizes)}, as the inputs have"
        )
    return [_own(_dense(part) if dim else part, where, device) for part in torch.split(leaf, list(sizes), dim)]


def _dense(part: Tensor) -> Tensor:
    """Removes the gaps that cutting along a later dimension leaves: the result is laid out like `part.clone()`."""
    return part if exact.is_dense(tuple(part.shape), part.stride()) else part.clone()


def _given(leaf: Microbatches, sizes: Sequence[int], where: str, device: torch.device | None) -> list[Any]:
    if len(leaf) != len(sizes):
        raise ShapeError(f"{where} has {len(leaf)} pieces; expected {len(sizes)}, the number of microbatches")
    pieces = []
    for piece in leaf.pieces:
        flat = flatten(piece)
        own = [_own(leaf, where, device) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
        pieces.append(unflatten(own, flat.structure))
    return pieces


def on(tree: Any, device: torch.device | None) -> Any:
    """Moves a microbatch's tensors, which it owns, to a device; None leaves them where they are.

    Copies from the host do not wait for the device.
    """

    def moved(tensor: Tensor) -> Tensor:
        if device is None or tensor.device == device:
            return tensor
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=tensor.device.type == "cpu")

    if device is None or (isinstance(tree, Tensor) and tree.device == device):
        return tree
    return map_tensors(moved, tree)


def _own(tensor: Tensor, where: str, device: torch.device | None) -> Tensor:
    if tensor.requires_grad:
        raise ShapeError(
            f"{where} requires a gradient, which a pipeline does not return for its inputs; pass {where}.detach()"
        )
    return exact.own(tensor if device is None else tensor.to(device))


def _sizes_given(
    given: Sequence[tuple[Microbatches, str]], microbatches: int, what: str, pipelines: int, dims: Dims
) -> tuple[int, ...]:
    """The rows of each microbatch of a batch that is already cut. Each of `given` comes with its path."""
    counts = sorted({len(one) for one, _ in given})
    if len(counts) > 1:
        raise ShapeError(
            f"{what}: one Microbatches has {counts[0]} pieces, another {counts[-1]}; give all the same number"
        )
    check_count(counts[0], microbatches, what, pipelines)
    sizes = []
    for k in range(counts[0]):
        name = f"{what}, microbatch {k}"
        rows = (_rows(flatten(one.pieces[k]), name + path, dims, path) for one, path in given)
        sizes.append(_agreed(chain.from_iterable(rows), name))
    return tuple(sizes)


def check_count(count: int, microbatches: int, what: str, pipelines: int) -> None:
    """Raises ArgumentError if no schedule for `microbatches` can run this number of pieces."""
    if not pipelines <= count <= microbatches:
        raise ArgumentError(
            f"{what}: {counted(count, 'microbatch')} were given, but the schedule is for {microbatches}"
            + (f", and needs at least {pipelines}" if pipelines > 1 else "")
            + "; give at most as many, or make the pipeline with a larger microbatches="
        )


def kind_of(flat: Flat) -> Hashable:
    """What a recording depends on, except tensors' values."""
    return flat.structure, tuple(map(_kind_of_leaf, flat.leaves))


def _kind_of_leaf(leaf: Any) -> Hashable:
    """A leaf as `describe` sees it, but without its device: microbatches are moved to the first stage's device."""
    if isinstance(leaf, Microbatches):
        return tuple(kind_of(flatten(piece)) for piece in leaf.pieces)
    return describe(leaf)[:4]
