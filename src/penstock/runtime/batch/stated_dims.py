"""What `batch_dims=` states, parsed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from penstock._base.errors import ArgumentError, is_integer
from penstock._base.pytree import flatten
from penstock.runtime.batch.batch_dims import FIRST, REDUCED, BatchDims, Dim, Dims, normalize_path


def parse(dims: BatchDims | Mapping[str, Any] | Dim) -> tuple[Dims, Dims, Dims]:
    """Parse `batch_dims`: return the dimensions of (args, kwargs), of the target and of the output.

    Raises:
        ArgumentError: it is neither a dimension nor a dict of args, kwargs, target and output, or states something
            other than dimensions.
    """
    if dims is None:
        return FIRST, Dims("target"), Dims("output")
    keys = BatchDims.__optional_keys__
    parts: dict[Any, Any] = dict(dims) if isinstance(dims, Mapping) else dict.fromkeys(keys, dims)
    named = {key: parts.pop(key) for key in [*parts] if isinstance(key, str) and key not in keys}
    if named and isinstance(parts.get("kwargs", {}), Mapping):
        parts["kwargs"] = {**parts.get("kwargs", {}), **named}
        named = {}
    if named or not parts.keys() <= keys or (not isinstance(dims, Mapping) and _parse_dim(dims) is ...):
        raise ArgumentError(
            f"batch_dims={dims!r}: expected a dimension for all, or a dict with any of 'args', 'kwargs', 'target', "
            "'output' and names of inputs by keyword, such as {'args': (1, 0), 'mask': None, 'target': 1, 'output': 1}"
        )
    inputs = (*_parse_dims(parts, "args", "[0]"), *_parse_dims(parts, "kwargs", "[1]"))
    return (
        Dims("input", inputs),
        Dims("target", _parse_dims(parts, "target")),
        Dims("output", _parse_dims(parts, "output")),
    )


def _parse_dims(parts: Mapping[str, Any], name: str, prefix: str = "") -> tuple[tuple[str, Dim], ...]:
    flat = flatten(parts.get(name, {}))
    stated = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        dim = _parse_dim(leaf)
        if dim is ... or (isinstance(dim, str) and name != "output"):
            extra = ", 'mean' or 'sum'" if name == "output" else ""
            raise ArgumentError(
                f"batch_dims[{name!r}]{path} is {leaf!r}; expected a dimension, or None for what goes whole to each "
                f"microbatch{extra}"
            )
        stated.append((normalize_path(prefix + path), dim))
    return tuple(stated)


def _parse_dim(leaf: Any) -> Dim | EllipsisType:
    """Return a stated dimension; `...` for what is none."""
    if leaf is None or is_integer(leaf) or leaf in REDUCED:
        return leaf  # type: ignore[no-any-return]
    torch_module: Any = sys.modules.get(
        "torch.distributed.pipelining.microbatch"
    )  # if it is not loaded, the leaf is not torch's: saves an import
    if torch_module is not None and isinstance(leaf, torch_module.TensorChunkSpec):
        return int(leaf.split_dim)
    if torch_module is not None and (leaf is torch_module._Replicate or isinstance(leaf, torch_module._Replicate)):
        return None
    return ...
