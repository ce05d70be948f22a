"""What a forward leaves behind besides its result, for the loss function to read: `layer.l_aux`, a list of losses.

Stages do not leave it: a value that was recorded call by call is not stored in any attribute, and another stage's
modules are in another process. So small values that require a gradient travel to the last stage as extra outputs, and
are put in their places while the loss function runs. All other values are replaced by something that raises when used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import PartitionError
from penstock._base.pytree import flatten, unflatten
from penstock.partition.nested import Constant, fill_in, tensors_in
from penstock.partition.state.reachable import Holder

MAX_CARRIED = 1024
"""The most elements that a value may have to be carried to the last stage in case the loss function reads it."""

ALL_UNITS = "*"
"""If this is among the names of shut units, nothing is carried at all."""

SCALARS = (bool, int, float, str)


class Absent(Tensor):
    """Stands in for a value that is not there."""

    text: str

    @classmethod
    def at(cls, text: str) -> Absent:
        absent = torch.empty(0).as_subclass(cls)
        absent.__dict__["text"] = text
        return absent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(self.__dict__["text"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.__dict__['text']}, which is not here>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        text = next((t.__dict__["text"] for t in tensors_in((args, kwargs)) if isinstance(t, Absent)), "")
        raise _refusal(text)


def _refusal(text: str) -> PartitionError:
    return PartitionError(
        f"the loss reads {text}, which the forward leaves there on another stage, or in the model's own forward; "
        "return it from the model's forward, so that it is part of the output that the loss gets"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """An entry of a place that the forward has changed.

    Attributes:
        value: what it was changed to; once recorded, flattened: each leaf the index of an output, or a `Constant`, with
            `Absent` instead of tensors.
        units: the modules that made it, if all of its tensors are from modules that run as a whole.
        small: its tensors to carry.
        is_carried: whether there are any.
    """

    place: Holder
    key: Any
    value: Any
    units: frozenset[str] = frozenset()
    small: tuple[Tensor, ...] = ()
    is_carried: bool = False

    @property
    def text(self) -> str:
        return self.place.name(self.key)

    def recorded(self, find_output: Callable[[Tensor], int]) -> Left:
        """Return the same with its tensors replaced. `find_output` returns the index of the output that carries a
        tensor."""
        carried_ids, flat = {id(t) for t in self.small}, flatten(self.value)
        leaves: list[Any] = []
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if id(leaf) in carried_ids:
                leaves.append(find_output(leaf))
            else:
                leaves.append(Constant(Absent.at(self.text + path) if any(True for _ in tensors_in(leaf)) else leaf))
        return replace(self, value=flat._replace(leaves=leaves), small=(), is_carried=bool(self.small))


@contextmanager
def in_place(left: Sequence[Left], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Put what the forward left into its places, built from a microbatch's outputs; restore everything afterwards."""
    snapshots = [(entry.place, entry.place.copied()) for entry in left]
    try:
        for entry in left:
            value = unflatten(fill_in(entry.value.leaves, outputs), entry.value.structure)
            entry.place.put(value if entry.key is None else {**entry.place.entries, entry.key: value})
        yield
    finally:
        for holder, entries in reversed(snapshots):
            holder.put(entries)
