"""What in a batch has rows: the batch dimension of each leaf (what `batch_dims=` states, otherwise the first), lists
with an entry for each row, and values that are already cut."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, ShapeError
from penstock._base.formatting import pluralize
from penstock._base.pytree import Flat, Leaf, flatten, leaf_tensors

Dim = int | str | None
"""A dimension (from the end if negative); None: each microbatch gets the whole leaf. For outputs also how the values of
microbatches are combined into the batch's: "mean" (weighted by rows) or "sum"."""

REDUCED = ("mean", "sum")


class BatchDims(TypedDict, total=False):
    """What `batch_dims=` states. Each entry mirrors what it describes, or gives one `Dim` for a whole part of it.

    Leaves that are not mentioned have the batch in their first dimension. Any other key names an input passed by
    keyword.
    """

    args: Any
    kwargs: Any
    target: Any
    output: Any


@dataclass(frozen=True, slots=True)
class Dims:
    """The batch's dimension in each leaf of one structure.

    Attributes:
        label: what the dimensions describe, for messages.
        stated: dimensions by the path of a leaf, or of a part of the structure.
        min_rows: the fewest rows that a microbatch has, if the batch has enough.
        entries: paths of lists with tensors that had one row of the batch in each entry in the example.
    """

    label: str
    stated: tuple[tuple[str, Dim], ...] = ()
    min_rows: int = 1
    entries: frozenset[str] = frozenset()

    def get(self, path: str) -> Dim:
        """Return the dimension stated for the leaf at `path`. The most specific statement applies."""
        if not self.stated:
            return 0
        path = normalize_path(path)
        matches = [(len(prefix), dim) for prefix, dim in self.stated if path.startswith(prefix)]
        return max(matches, key=lambda pair: pair[0])[1] if matches else 0

    def is_stated(self, path: str) -> bool | None:
        """Whether a dimension is stated for just what is at `path`, rather than for more; None: for parts of it."""
        path = normalize_path(path)
        within = {prefix == path for prefix, _ in self.stated if prefix.startswith(path)}
        return None if False in within else bool(within)

    def subtree(self, path: str, label: str) -> Dims:
        """Return the dimensions stated within the part of the structure at `path`, which is called `label` itself."""
        path = normalize_path(path)
        inner = [(prefix.removeprefix(path), dim) for prefix, dim in self.stated if prefix.startswith(path)]
        return Dims(label, (("", self.get(path)), *inner))

    def cut_dim(self, path: str, tensor: Any, label: str) -> int | None:
        """Return the dimension of `tensor` to cut along, counted from the front; None if it is not cut.

        Raises:
            ShapeError: the tensor has no such dimension, or is sparse (adjacencies of pygcn) or nested.
        """
        dim = self.get(path)
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_nested):
            raise ShapeError(
                f"{label} is a {'nested' if tensor.is_nested else 'sparse'} tensor; expected a dense one (to_dense(), "
                "to_padded_tensor(0.0)), from which a block may make it; one for all batches may be a buffer (COO)"
            )
        if dim is None or not tensor.ndim:
            return None
        assert isinstance(dim, int)  # only outputs are reduced
        return check_dim(dim, tensor, label)

    def check_paths(self, paths: Iterable[str]) -> None:
        """Raise ArgumentError for a statement about something that is not among the leaves at `paths`."""
        existing = [normalize_path(path) for path in paths]
        for stated_path, _ in self.stated:
            if stated_path not in _ROOT_PATHS and not any(path.startswith(stated_path) for path in existing):
                available = ", ".join(self.label + path for path in existing) or "none"
                raise ArgumentError(f"batch_dims names {self.label}{stated_path}, but there is only {available}")


_ROOT_PATHS = ("", "[0]", "[1]")
"""Statements about a whole target or output, or about all args or kwargs, may match nothing."""


def check_dim(dim: int, tensor: Any, label: str) -> int:
    """Return a dimension counted from the front. Raise ShapeError if the tensor has no such dimension."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ShapeError(
            f"{label} has shape {list(tensor.shape)}, but batch_dims puts the batch in its dimension {dim}; "
            "pass another one for it, or None to pass it whole to each microbatch"
        )
    return dim % int(tensor.ndim)


FIRST = Dims("input")
"""Every leaf has the batch in its first dimension."""


def normalize_path(path: str) -> str:
    """Normalize a path so that a dict's keys and an object's fields are written alike, since one may mirror the
    other."""
    return re.sub(r"\.([^\W\d]\w*)", r"['\1']", path)


LIST_TYPES = (list, tuple, range, deque)
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


def iter_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch, each with its path; those in `Microbatches` with their path in a piece, for each
    piece."""
    flat = flatten(tree)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Microbatches):
            for piece in leaf.pieces:
                yield from ((path + inner, part) for inner, part in iter_leaves(piece))
        else:
            yield path, leaf


SizesFor = Callable[[int], Sequence[int]]
"""Returns the sizes of the microbatches, from the number of rows of the batch."""


def count_rows(
    tree: Any, label: str, dims: Dims = FIRST, raw: Flat | None = None, sizes_for: SizesFor = lambda rows: ()
) -> int:
    """Return the number of rows of a batch: what its tensors agree on. If they only do with one row in each entry of
    lists, or did in the example, the length of these; without tensors, that of all lists and arrays.
    `raw`: the tree, flattened.

    Raises:
        ShapeError: there is nothing with rows, or two of them disagree.
    """
    tensors = [*tensor_rows(raw or flatten(tree), label, dims)]
    names: dict[int, str] = {}
    for rows, name in tensors:
        names.setdefault(rows, name)
    agreed = tensors[0][0] if len(names) == 1 else None
    if agreed is not None and agreed != 3 and not dims.entries:
        return agreed
    flat = flatten(tree, is_leaf=lambda value, path: may_be_list_of_rows(value, path, dims))
    leaves = [*zip(flat.leaves, flat.paths, strict=True)]
    if agreed is not None:
        lists = [(leaf, path) for leaf, path in leaves if _has_rows_as_entries(leaf, path, agreed, dims)]
        if sum(len([*tensor_rows(flatten(leaf), label, dims, path)]) for leaf, path in lists) < len(tensors):
            _check_positions(leaves if agreed == 3 else (), label, dims)
            return agreed
        for leaf, path in lists:
            _check_stated(leaf, path, f"{label}{path}", dims)
    counts = {row_count(leaf, path, dims) for leaf, path in leaves if not names or holds_tensors(leaf)} - {None}
    if len(counts) == 1:
        return counts.pop() or 0
    if not names:
        raise ShapeError(f"{label}: no tensor with rows was given; expected a batch in the first dimension of a tensor")
    suggestion = suggest_microbatches(max(names), sizes_for(min(names)) if min(names) > 1 else ())
    raise ShapeError(
        f"{label}: tensors disagree on the number of rows: {', '.join(names.values())}; each tensor must have the "
        "batch in its first dimension (scalars and plain values are repeated). If it is elsewhere, set "
        f"batch_dims= (None: whole to each microbatch); if one has several rows for each of another, {suggestion} "
        "what no dimension describes (graphs, packed sequences), cut with a function: split_fn="
    )


def _is_image_list(value: Any) -> bool:
    """Whether each entry of this list is, or holds, images [3, H, W] and no other tensors: a list of images is what
    torchvision's detection models take, of dicts with one detectron2's, of lists NaViT of vit_pytorch."""
    if type(value) not in (list, tuple):
        return False
    entries = [leaf_tensors(entry) for entry in value]
    if any(type(entry) is tuple and len(tensors) > 1 for entry, tensors in zip(value, entries, strict=True)):
        return False  # keys and values, or states, of three rows
    return all(entries) and all(
        x.ndim == 3 and x.shape[0] == 3 and (x.is_floating_point() or x.dtype == torch.uint8)
        for tensors in entries
        for x in tensors
    )


def _has_rows_as_entries(value: Any, path: str, rows: int, dims: Dims) -> bool:
    """Whether this is a list whose tensors, of `rows` rows, may have one row of the batch in each entry: it had in the
    example, or they are images [3, H, W]."""
    return type(value) in LIST_TYPES and (normalize_path(path) in dims.entries or (rows == 3 and _is_image_list(value)))


def _check_positions(leaves: Sequence[tuple[Any, str]], label: str, dims: Dims) -> None:
    """Raise ShapeError for Qwen2-VL's positions [3, 3, S] in a batch of three rows, if `batch_dims` states no
    dimension."""
    leading_shapes = [leaf.shape[:2] for leaf, _ in leaves if isinstance(leaf, Tensor)]
    for leaf, path in leaves:
        are_positions = isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.shape[:-1] == (3, 3)
        if are_positions and leaf.shape[1:] in leading_shapes and not dims.is_stated(path):
            raise ShapeError(
                f"{label}{path} {[*leaf.shape]} has the batch's 3 rows in dimension 0 or 1; pass batch_dims= with the "
                "dimension for it, 1 for positions of 3 kinds"
            )


def _check_stated(value: Any, path: str, label: str, dims: Dims) -> None:
    """Raise ShapeError for a list that may or may not have one entry per row, if `batch_dims` states neither."""
    if not dims.is_stated(path):
        first = value[0]
        kind = f"tensors like {[*first.shape]}" if isinstance(first, Tensor) else f"{type(first).__name__}s"
        raise ShapeError(
            f"{label} is a {type(value).__name__} of {len(value)} {kind}: is each one row of the batch? Pass "
            "batch_dims= with 0 for it to cut it between them, or None to give it whole to each microbatch"
            f"{', or a list with the dimension of each' * isinstance(first, Tensor)}; or cut with a function: split_fn="
        )


def suggest_microbatches(rows: int, sizes: Sequence[int], dim: int = 0) -> str:
    """Describe how to pass a tensor of `rows` rows, the same number for each row of microbatches of these sizes."""
    total = sum(sizes)
    if not total or any(size * rows % total for size in sizes):
        return "pass its pieces, as penstock.Microbatches([...]);"
    piece_rows = [size * rows // total for size in sizes]
    argument = f"{piece_rows[0] if len({*piece_rows}) == 1 else piece_rows}{f', {dim}' if dim else ''}"
    return f"pass the one of {rows} rows as penstock.Microbatches(x.split({argument}));"


def tensor_rows(flat: Flat, label: str, dims: Dims, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield the rows of each tensor to cut, and its name. `prefix`: the path of `flat` within what is stated."""
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, Tensor):
            dim = dims.cut_dim(prefix + path, leaf, f"{label}{path}")
            if dim is not None:
                yield leaf.shape[dim], f"{label}{path} {list(leaf.shape)}" + (f" along dimension {dim}" if dim else "")


def row_count(leaf: Any, path: str, dims: Dims) -> int | None:
    """Return the rows of a tensor or array, or the number of entries of a list; None for anything else."""
    if type(leaf) in LIST_TYPES:
        return len(leaf)
    numpy: Any = sys.modules.get("numpy")  # if it is not loaded, there are no arrays: saves an import
    has_shape = isinstance(leaf, Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray))
    dim = dims.cut_dim(path, leaf, dims.label + path) if has_shape else None
    return None if dim is None else int(leaf.shape[dim])


def holds_tensors(leaf: Any) -> bool:
    """Whether this is a tensor, or holds tensors or pieces of them."""
    return any(isinstance(item, (Tensor, Microbatches)) for item in flatten(leaf).leaves)


def may_be_list_of_rows(value: Any, path: str, dims: Dims) -> bool:
    """Whether this is a list or tuple that may have one entry per row. The model's arguments are none, nor is one whose
    entries have dimensions of their own in `batch_dims`."""
    if type(value) not in LIST_TYPES or not value or (dims.label == "input" and path in ("", "[0]")):
        return False
    return dims.get(path) is not None and dims.is_stated(path) is not None


def is_list_of_rows(value: Any, path: str, rows: int, label: str, dims: Dims) -> bool:
    """Whether this is a list with one entry per row, to be cut between them: it has as many entries, and no tensors, or
    tensors that do not all have the rows. DataLoader makes such lists of texts; torchvision's detection models take
    lists of images and of dicts.

    Raises:
        ShapeError: it may as well be something else: up to 3 numbers a size, dicts of tensors with the rows caches.
    """
    if not may_be_list_of_rows(value, path, dims):
        return False
    if len(value) != rows:
        if rows > 1 and dims.is_stated(path) and not holds_tensors(value):
            raise ShapeError(f"{label} has {len(value)} entries; expected {rows}, one for each row, as the example has")
        return False
    inner = flatten(value)
    counts = {count for count, _ in tensor_rows(inner, label, dims, path)}
    if rows == 1:  # as it is, or with the several objects of one picture
        return bool(counts - {1})
    if counts and dims.is_stated(path) and dims.get(path) == 0:
        return True
    have_rows = counts == {rows}  # each tensor has as many as there are entries
    if have_rows and (all(isinstance(x, dict) for x in value) or _is_image_list(value)):
        _check_stated(value, path, label, dims)
        return True
    if not counts and rows <= 3 and dims.label == "input" and all(type(x) in (int, float) for x in value):
        _check_stated(value, path, label, dims)
    same_ndim = len({leaf.dim() for leaf in value if isinstance(leaf, Tensor)}) < 2
    return not have_rows and same_ndim and not any(isinstance(leaf, Microbatches) for leaf in inner.leaves)


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


def piece_sizes(raw: Flat, microbatches: int, label: str, pipelines: int, dims: Dims) -> tuple[int, ...]:
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
