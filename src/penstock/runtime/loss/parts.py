"""What a loss function returns besides its loss: scalars to log, in a tuple, a dict or the fields of an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def loss_in(returned: Any) -> Any:
    """The loss in what a loss function returned: the entry "loss", or else the first."""
    if isinstance(returned, Tensor):
        return returned
    entries = dict(_entries(returned))
    return entries.get("loss", next(iter(entries.values()))) if entries else returned


def parts_in(returned: Any, loss: Any) -> dict[str, Tensor]:
    """All other scalars in it, without their graphs, by name: "ce" for `(loss, {"ce": ...})`, "1" for `(loss, ce)`."""
    return dict(_scalars(returned, loss, (), 2))


def _scalars(value: Any, loss: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, Tensor]]:
    if value is loss:
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor):
        if not value.dim() and not value.is_complex():
            value = value.detach().clone()
            yield ".".join(path), value if value.is_floating_point() else value.double()
    elif depth:
        for key, part in _entries(value):
            yield from _scalars(part, loss, (*(p for p in path if not p.isdecimal()), key), depth - 1)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a container, and the fields of an object, by name."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (tuple, list)):
        yield from zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True)
    else:
        yield from getattr(value, "__dict__", {}).items()
