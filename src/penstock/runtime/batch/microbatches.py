"""A batch, cut into microbatches along its first dimension or other stated ones, or already cut by the user.

Every tensor of a batch (in any nesting that torch can flatten) has the batch's rows in its first dimension, unless
`Dims` say otherwise. A list or array with one entry per row is cut too (`is_column`); scalars and other plain values go
to each microbatch unchanged. A batch that does not divide evenly gives microbatches whose sizes differ by one; one with
fewer rows than microbatches gives fewer of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock._base.compat import is_block_mask
from penstock._base.errors import ArgumentError, ShapeError
from penstock._base.trees import Flat, Leaf, flatten, map_tensors, unflatten
from penstock._base.words import counted
from penstock.partition.stages.partition import describe
from penstock.runtime.batch import block_masks
from penstock.runtime.batch.batch_dims import FIRST, Dims
from penstock.runtime.exact import rules as exact

LISTS = (list, tuple, range, deque)
"""What may have one entry per row."""


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


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a batch, each with its path; those in `Microbatches` with their path in a piece, for each piece."""
    flat = flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Microbatches):
            for piece in leaf.pieces:
                yield from ((path + inner, part) for inner, part in leaves_of(piece))
        else:
            yield path, leaf


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


Sized = Callable[[int], Sequence[int]]
"""The sizes of the microbatches of a batch of so many rows."""


def sizes_of(rows: int, microbatches: int, pipelines: int = 1, min_rows: int = 1) -> tuple[int, ...]:
    """How many rows each microbatch gets: as evenly as possible, larger ones first.

    With too few rows for `min_rows` in each of the microbatches there are fewer of these.

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
    microbatches = max(min(rows // min_rows, microbatches), pipelines)
    small, extra = divmod(rows, microbatches)
    return tuple(small + (index < extra) for index in range(microbatches))


def rows_of(tree: Any, what: str, dims: Dims = FIRST, raw: Flat | None = None, sized: Sized = lambda rows: ()) -> int:
    """The number of rows of a batch: what its tensors agree on. If they only do with one row in each entry of lists,
    the length of these; without tensors, that of all lists and arrays. `raw`: the tree, flattened.

    Raises:
        ShapeError: there is nothing with rows, or two of them disagree.
    """
    found = [*_rows(raw or flatten(tree), what, dims)]
    names: dict[int, str] = {}
    for rows, name in found:
        names.setdefault(rows, name)
    if len(names) == 1 and found[0][0] != 3:
        return found[0][0]
    flat = flatten(tree, is_leaf=lambda value, path: is_list(value, path, dims))
    pairs = [*zip(flat.leaves, flat.paths, strict=True)]
    if len(names) == 1 and not _refuse_unsure(pairs, len(found), what, dims):
        return 3
    lengths = {length(leaf, path, dims) for leaf, path in pairs if not names or holds_tensors(leaf)} - {None}
    if len(lengths) == 1:
        return lengths.pop() or 0
    if not names:
        raise ShapeError(f"{what}: no tensor with rows was given; expected a batch in the first dimension of a tensor")
    ready = _ready_made(max(names), sized(min(names)) if min(names) > 1 else ())
    raise ShapeError(
        f"{what}: tensors disagree on the number of rows: {', '.join(names.values())}; each tensor must have the batch "
        "in its first dimension (scalars and plain values are repeated). Where it lies elsewhere, say so with "
        f"batch_dims= (None: whole to each microbatch); where one has several rows for each of another, {ready} "
        "what no dimension describes (graphs, packed sequences), cut with a function: split="
    )


def _are_pictures(value: Any) -> bool:
    """Whether this is a list of pictures [3, H, W], as torchvision's detection models take it."""
    return type(value) in (list, tuple) and all(
        isinstance(one, Tensor) and one.ndim == 3 and one.is_floating_point() and one.shape[0] == 3 for one in value
    )


def _refuse_unsure(pairs: Sequence[tuple[Any, str]], tensors: int, what: str, dims: Dims) -> bool:
    """Whether all of so many tensors, whose first dimension is 3, are pictures, of which `batch_dims` says that each is
    a row. Raises ShapeError if it does not say so, nor in which dimension Qwen2-VL's positions [3, 3, S] have rows.
    """
    pictures = [pair for pair in pairs if _are_pictures(pair[0])]
    if sum(len(leaf) for leaf, _ in pictures) == tensors:
        for leaf, path in pictures:
            _check_stated(leaf, path, f"{what}{path}", dims)
        return True
    others = [leaf.shape[:2] for leaf, _ in pairs if isinstance(leaf, Tensor)]
    for leaf, path in pairs:
        are_positions = isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.shape[:-1] == (3, 3)
        if are_positions and leaf.shape[1:] in others and not dims.states(path):
            raise ShapeError(
                f"{what}{path} {[*leaf.shape]} has the batch's 3 rows in dimension 0 or 1; pass batch_dims= with the "
                "dimension for it, 1 for positions of 3 kinds"
            )
    return False


def _check_stated(value: Any, path: str, where: str, dims: Dims) -> None:
    """Raises ShapeError for a list that may have an entry per row or not, if `batch_dims` does not say so."""
    if not dims.states(path):
        first = value[0]
        kind = f"tensors like {[*first.shape]}" if isinstance(first, Tensor) else f"{type(first).__name__}s"
        raise ShapeError(
            f"{where} is a {type(value).__name__} of {len(value)} {kind}: is each one row of the batch? Pass "
            "batch_dims= with 0 for it to cut it between them, or None to give it whole to each microbatch"
            f"{', or a list with the dimension of each' * isinstance(first, Tensor)}; or cut with a function: split="
        )


def _ready_made(rows: int, sizes: Sequence[int], dim: int = 0) -> str:
    """How to pass a tensor of `rows` rows, the same number for each row of microbatches of these sizes."""
    total = sum(sizes)
    if not total or any(size * rows % total for size in sizes):
        return "pass its pieces, as penstock.Microbatches([...]);"
    each = [size * rows // total for size in sizes]
    cut = f"{each[0] if len({*each}) == 1 else each}{f', {dim}' if dim else ''}"
    return f"pass the one of {rows} rows as penstock.Microbatches(x.split({cut}));"


def _rows(flat: Flat, what: str, dims: Dims, prefix: str = "") -> Iterator[tuple[int, str]]:
    """The rows of each tensor to cut, and its name. `prefix`: the path of `flat` within what is stated."""
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Tensor):
            dim = dims.at(prefix + path, leaf, f"{what}{path}")
            if dim is not None:
                yield leaf.shape[dim], f"{what}{path} {list(leaf.shape)}" + (f" along dimension {dim}" if dim else "")


def length(leaf: Any, path: str, dims: Dims) -> int | None:
    """The rows of a tensor or array, the number of entries of a list; None for anything else."""
    if type(leaf) in LISTS:
        return len(leaf)
    numpy: Any = sys.modules.get("numpy")  # if it is not loaded, there are no arrays: saves an import
    has_shape = isinstance(leaf, Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray))
    dim = dims.at(path, leaf, dims.what + path) if has_shape else None
    return None if dim is None else int(leaf.shape[dim])


def holds_tensors(leaf: Any) -> bool:
    """Whether this is a tensor, or holds tensors or pieces of them."""
    return any(isinstance(one, (Tensor, Microbatches)) for one in flatten(leaf).leaves)


def is_list(value: Any, path: str, dims: Dims) -> bool:
    """Whether this is a list or tuple that may have one entry per row. The model's arguments are none, nor is one whose
    entries have dimensions of their own in `batch_dims`."""
    if type(value) not in LISTS or not value or (dims.what == "input" and path in ("", "[0]")):
        return False
    return dims.of(path) is not None and dims.states(path) is not None


def is_column(value: Any, path: str, rows: int, where: str, dims: Dims) -> bool:
    """Whether this is a list with one entry per row, to be cut between them: it has as many entries, and no tensors, or
    tensors that do not all have the rows. DataLoader makes such lists of texts; torchvision's detection models take
    lists of pictures and of dicts.

    Raises:
        ShapeError: it may as well be something else: up to 3 numbers a size, dicts of tensors with the rows caches.
    """
    if not is_list(value, path, dims):
        return False
    if len(value) != rows or (rows == 1 and not (dims.states(path) and _are_pictures(value))):
        if rows > 1 and dims.states(path) and not holds_tensors(value):
            raise ShapeError(f"{where} has {len(value)} entries; expected {rows}, one for each row, as the example has")
        return False
    inner = flatten(value)
    found = {count for count, _ in _rows(inner, where, dims, path)}
    numbers = not found and rows <= 3 and dims.what == "input" and all(type(one) in (int, float) for one in value)
    dicts = found == {rows} and all(isinstance(one, dict) for one in value)
    pictures = found == {rows} and _are_pictures(value)
    if numbers or dicts or pictures:
        _check_stated(value, path, where, dims)
    alike = len({leaf.dim() for leaf in value if isinstance(leaf, Tensor)}) < 2
    whole = found == {rows} or not alike or any(isinstance(leaf, Microbatches) for leaf in inner.leaves)
    return dicts or pictures or not whole


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
    raw = flatten(tree, is_leaf=lambda value, _: is_block_mask(value))
    if given := any(isinstance(leaf, Microbatches) for leaf in raw.leaves):
        sizes = _sizes_given(raw, microbatches, what, pipelines, dims)
    else:
        sized = partial(sizes_of, microbatches=microbatches, pipelines=pipelines, min_rows=dims.min_rows)
        sizes = sized(rows_of(tree, what, dims, raw, sized))
    flat, leaves = _split(tree, sizes, what, device, dims)
    if given or flat.structure != raw.structure or any(map(is_block_mask, raw.leaves)):
        pieces = [flatten(unflatten(own, flat.structure)) for own in leaves]  # pieces of one leaf may differ in theirs
    else:
        pieces = [Flat(own, flat.paths, flat.structure) for own in leaves]
    return CutBatch(tuple(pieces), sizes, kind_of(raw))


def split(
    tree: Any, sizes: Sequence[int], what: str, device: torch.device | None = None, dims: Dims = FIRST
) -> list[Any]:
    """The microbatches of a batch, each tensor in its own aligned allocation on `device` (default: its own device).

    Raises:
        ShapeError: a tensor's rows are not the sum of `sizes`, a tensor requires a gradient, or something already cut
            has another number of pieces.
    """
    flat, pieces = _split(tree, sizes, what, device, dims)
    return [unflatten(leaves, flat.structure) for leaves in pieces]


def _split(
    tree: Any, sizes: Sequence[int], what: str, device: torch.device | None, dims: Dims
) -> tuple[Flat, list[list[Any]]]:
    """The batch, flattened, and the leaves of each piece; what `Microbatches` and columns become there is not flat."""
    rows = sum(sizes)
    flat = flatten(tree, is_leaf=lambda v, path: is_block_mask(v) or is_column(v, path, rows, what + path, dims))
    columns = [
        _split_leaf(leaf, path, sizes, f"{what}{path}", device, dims)
        for leaf, path in zip(flat.leaves, flat.paths, strict=True)
    ]
    return flat, [*map(list, zip(*columns, strict=True))] if columns else [[] for _ in sizes]


def _split_leaf(
    leaf: Any, path: str, sizes: Sequence[int], where: str, device: torch.device | None, dims: Dims
) -> Sequence[Any]:
    if isinstance(leaf, Microbatches):
        return _given(leaf, sizes, where, device, dims)
    if is_block_mask(leaf):
        return block_masks.cut(leaf, sizes, where, device)
    ends = list(accumulate(sizes))
    if is_column(leaf, path, ends[-1], where, dims):
        leaf = [*leaf] if type(leaf) in (range, deque) else leaf
        pieces = [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return _given(Microbatches(pieces), sizes, where, device, dims)
    if not isinstance(leaf, Tensor):
        if length(leaf, path, dims) != ends[-1]:
            return [leaf] * len(sizes)
        return list(sys.modules["numpy"].split(leaf, ends[:-1], dims.of(path)))
    dim = dims.at(path, leaf, where)
    if dim is None:
        return [_own(leaf, where, device, dims) for _ in sizes][::-1]  # autograd adds the latest one's gradient first
    if leaf.shape[dim] != ends[-1]:
        raise ShapeError(
            f"{where} has {leaf.shape[dim]} rows (shape {list(leaf.shape)}{f', dimension {dim}' if dim else ''}); "
            f"expected {ends[-1]}, as the inputs have; if it has several for each of theirs, or one for several, "
            f"{_ready_made(leaf.shape[dim], sizes, dim)} if it is to go whole to each microbatch, batch_dims= says so"
        )
    plain = not dim and device is None and not leaf.requires_grad
    if plain and (parts := exact.own_parts(leaf, sizes)) is not None:
        return parts
    return [_own(_dense(part) if dim else part, where, device, dims) for part in torch.split(leaf, list(sizes), dim)]


def _dense(part: Tensor) -> Tensor:
    """Removes the gaps that cutting along a later dimension leaves: the result is laid out like `part.clone()`."""
    return part if exact.is_dense(tuple(part.shape), part.stride()) else part.clone()


def _given(leaf: Microbatches, sizes: Sequence[int], where: str, device: torch.device | None, dims: Dims) -> list[Any]:
    if len(leaf) != len(sizes):
        raise ShapeError(f"{where} has {len(leaf)} pieces; expected {len(sizes)}, the number of microbatches")
    return [map_tensors(lambda tensor: _own(tensor, where, device, dims), piece) for piece in leaf.pieces]


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


def _own(tensor: Tensor, where: str, device: torch.device | None, dims: Dims) -> Tensor:
    moved = tensor if device is None else tensor.to(device)
    if not tensor.requires_grad:
        return exact.own(moved)
    if dims.what == "target":
        raise ShapeError(
            f"{where} requires a gradient, which a pipeline returns for the model's inputs alone; pass {where}.detach()"
        )
    own: Tensor = exact.Own.apply(moved)  # type: ignore[no-untyped-call]
    return own


def _sizes_given(raw: Flat, microbatches: int, what: str, pipelines: int, dims: Dims) -> tuple[int, ...]:
    """The rows of each microbatch of a batch that is already cut: those of the first tensor in its piece, unless
    tensors beside it have another number, and are cut evenly."""
    given = [pair for pair in zip(raw.leaves, raw.paths, strict=True) if isinstance(pair[0], Microbatches)]
    counts = sorted({len(one) for one, _ in given})
    if len(counts) > 1:
        raise ShapeError(
            f"{what}: one Microbatches has {counts[0]} pieces, another {counts[-1]}; give all the same number"
        )
    check_count(counts[0], microbatches, what, pipelines)
    pieces = [[flatten(one.pieces[k]) for one, _ in given] for k in range(counts[0])]
    rows = [
        [n for flat, (_, path) in zip(flats, given, strict=True) for n, _ in _rows(flat, what, dims, path)]
        for flats in pieces
    ]
    sizes = tuple(found[0] if found else 1 for found in rows)
    beside = {n for n, _ in _rows(raw, what, dims)}
    return sizes if beside <= {sum(sizes)} else sizes_of(min(beside), counts[0])


def check_count(count: int, microbatches: int, what: str, pipelines: int) -> None:
    """Raises ArgumentError if no schedule for `microbatches` can run this number of pieces."""
    if not pipelines <= count <= microbatches:
        raise ArgumentError(
            f"{what}: {counted(count, 'microbatch')} were given, but the schedule is for {microbatches}"
            + (f", and needs at least {pipelines}" if pipelines > 1 else "")
            + "; pass at most as many, or make the pipeline with a larger microbatches="
        )


def kind_of(flat: Flat) -> Hashable:
    """What a recording depends on, except tensors' values."""
    return flat.structure, tuple(map(_kind_of_leaf, flat.leaves))


def _kind_of_leaf(leaf: Any) -> Hashable:
    """A leaf as `describe` sees it, but without its device: microbatches are moved to the first stage's device."""
    if isinstance(leaf, Microbatches):
        return tuple(kind_of(flatten(piece)) for piece in leaf.pieces)
    if is_block_mask(leaf):
        return kind_of(flatten(leaf))
    takes_gradient = isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()
    return *describe(leaf)[:4], takes_gradient
