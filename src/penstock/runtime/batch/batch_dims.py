"""The batch dimension of each leaf: what `batch_dims=` states, otherwise the first."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from penstock._base.errors import ArgumentError, ShapeError, is_integer
from penstock._base.trees import flatten

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
        what: what the dimensions describe, for messages.
        stated: dimensions by the path of a leaf, or of a part of the structure.
        min_rows: the fewest rows that a microbatch has, if the batch has enough.
    """

    what: str
    stated: tuple[tuple[str, Dim], ...] = ()
    min_rows: int = 1

    def of(self, path: str) -> Dim:
        """The dimension stated for the leaf at `path`. The most specific statement applies."""
        if not self.stated:
            return 0
        path = plain(path)
        found = [(len(part), dim) for part, dim in self.stated if path.startswith(part)]
        return max(found, key=lambda pair: pair[0])[1] if found else 0

    def states(self, path: str) -> bool | None:
        """Whether a dimension is stated for just what is at `path`, rather than for more; None: for parts of it."""
        path = plain(path)
        within = {part == path for part, _ in self.stated if part.startswith(path)}
        return None if False in within else bool(within)

    def below(self, path: str, what: str) -> Dims:
        """The dimensions stated within the part of the structure at `path`, which is called `what` itself."""
        path = plain(path)
        inner = [(part.removeprefix(path), dim) for part, dim in self.stated if part.startswith(path)]
        return Dims(what, (("", self.of(path)), *inner))

    def at(self, path: str, tensor: Any, where: str) -> int | None:
        """The dimension of `tensor` to cut along, counted from the front; None if it is not cut.

        Raises:
            ShapeError: the tensor has no such dimension.
        """
        dim = self.of(path)
        if dim is None or not tensor.ndim:
            return None
        assert isinstance(dim, int)  # only outputs are reduced
        return checked(dim, tensor, where)

    def refuse_unknown(self, paths: Iterable[str]) -> None:
        """Raises ArgumentError for a statement about something that is not among the leaves at `paths`."""
        known = [plain(path) for path in paths]
        for part, _ in self.stated:
            if part not in _ALL and not any(path.startswith(part) for path in known):
                there = ", ".join(self.what + path for path in known) or "none"
                raise ArgumentError(f"batch_dims speaks of {self.what}{part}, but there is only {there}")


_ALL = ("", "[0]", "[1]")
"""Statements about a whole target or output, or about all args or kwargs, may match nothing."""


def checked(dim: int, tensor: Any, where: str) -> int:
    """A dimension counted from the front. Raises ShapeError if the tensor has no such dimension."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ShapeError(
            f"{where} has shape {list(tensor.shape)}, but batch_dims says that the batch is in its dimension {dim}; "
            "state another one for it, or None to give it whole to each microbatch"
        )
    return dim % int(tensor.ndim)


FIRST = Dims("input")
"""Every leaf has the batch in its first dimension."""


def parse(given: BatchDims | Mapping[str, Any] | Dim) -> tuple[Dims, Dims, Dims]:
    """The dimensions of (args, kwargs), of the target and of the output, from what the user gave as `batch_dims`.

    Raises:
        ArgumentError: it is neither a dimension nor a dict of args, kwargs, target and output, or states something
            other than dimensions.
    """
    if given is None:
        return FIRST, Dims("target"), Dims("output")
    known = BatchDims.__optional_keys__
    parts: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else dict.fromkeys(known, given)
    named = {key: parts.pop(key) for key in [*parts] if isinstance(key, str) and key not in known}
    if named and isinstance(parts.get("kwargs", {}), Mapping):
        parts["kwargs"] = {**parts.get("kwargs", {}), **named}
        named = {}
    if named or not parts.keys() <= known or (not isinstance(given, Mapping) and isinstance(_dim(given), _Wrong)):
        raise ArgumentError(
            f"batch_dims={given!r}: expected a dimension for all, or a dict with any of 'args', 'kwargs', 'target', "
            "'output' and names of inputs by keyword, such as {'args': (1, 0), 'mask': None, 'target': 1, 'output': 1}"
        )
    inputs = {f"[{index}]": parts[key] for index, key in enumerate(("args", "kwargs")) if key in parts}
    stated = [pair for prefix, tree in inputs.items() for pair in _stated(tree, prefix, ("args", "kwargs"))]
    return (
        Dims("input", tuple(stated)),
        Dims("target", tuple(_stated(parts["target"], "", ("target",))) if "target" in parts else ()),
        Dims("output", tuple(_stated(parts["output"], "", ("output",))) if "output" in parts else ()),
    )


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Something that is not a dimension."""


def _stated(tree: Any, prefix: str, names: tuple[str, ...]) -> list[tuple[str, Dim]]:
    flat = flatten(tree)
    found = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        dim = _dim(leaf)
        if isinstance(dim, _Wrong) or (isinstance(dim, str) and names != ("output",)):
            name = names[int(prefix[1])] if prefix else names[0]
            more = ", 'mean' or 'sum'" if name == "output" else ""
            raise ArgumentError(
                f"batch_dims[{name!r}]{path} is {leaf!r}; expected a dimension, or None for what goes whole to each "
                f"microbatch{more}"
            )
        found.append((plain(prefix + path), dim))
    return found


def _dim(leaf: Any) -> Dim | _Wrong:
    if leaf is None or is_integer(leaf) or leaf in REDUCED:
        return leaf  # type: ignore[no-any-return]
    theirs: Any = sys.modules.get(
        "torch.distributed.pipelining.microbatch"
    )  # if it is not loaded, the leaf is not torch's: saves an import
    if theirs is not None and isinstance(leaf, theirs.TensorChunkSpec):
        return int(leaf.split_dim)
    if theirs is not None and (leaf is theirs._Replicate or isinstance(leaf, theirs._Replicate)):
        return None
    return _Wrong()


def plain(path: str) -> str:
    """A path that writes a dict's keys and an object's fields alike, so that one may mirror the other."""
    return re.sub(r"\.([^\W\d]\w*)", r"['\1']", path)
