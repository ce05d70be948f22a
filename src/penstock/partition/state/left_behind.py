"""What a forward leaves behind besides its result, for the loss function to read: `layer.l_aux`, a list of losses.

Stages do not leave it: a value that was recorded call by call is not stored in any attribute, and another stage's
modules are in another process. So small values that require a gradient travel to the last stage as extra outputs, and
are put in their places while the loss function runs. All other values are replaced by something that raises when used.

Most blocks that leave something for others (`self.l_aux = ...`) are opened, so that nothing is left anywhere
(`run/side_channels.py`). One that depends on values must run as a whole: right after the call, its value is taken out
of the attribute, and is then a value like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import PartitionError
from penstock._base.trees import Flat, flatten, unflatten
from penstock.partition.state.reach import Holder
from penstock.partition.values.objects import tensors_in

SMALL = 1024
"""The most elements that a value may have to be carried to the last stage in case the loss function reads it."""


EVERY = "*"
"""If this is among the names of shut units, nothing is carried at all."""

SCALARS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Carried:
    """Stands in for a value that comes as the output at `index`."""

    index: int


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
        value: what it was changed to; once recorded, flattened, with `Carried` and `Absent` instead of tensors.
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

    def recorded(self, index_of: Callable[[Tensor], int]) -> Left:
        """The same with its tensors replaced. `index_of` returns the index of the output that carries a tensor."""
        wanted, flat = {id(t) for t in self.small}, flatten(self.value)
        leaves: list[Any] = []
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if id(leaf) in wanted:
                leaves.append(Carried(index_of(leaf)))
            else:
                leaves.append(Absent.at(self.text + path) if any(True for _ in tensors_in(leaf)) else leaf)
        return replace(self, value=flat._replace(leaves=leaves), small=(), is_carried=bool(self.small))


@contextmanager
def in_place(left: Sequence[Left], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Puts what the forward left into its places, built from a microbatch's outputs; restores everything afterwards."""
    before = [(entry.place, entry.place.copied()) for entry in left]
    try:
        for entry in left:
            entry.place.replace(entry.key, _filled(entry.value, outputs))
        yield
    finally:
        for place, entries in reversed(before):
            place.put(entries)


def _filled(template: Flat, outputs: Sequence[Tensor]) -> Any:
    leaves = [outputs[leaf.index] if isinstance(leaf, Carried) else leaf for leaf in template.leaves]
    return unflatten(leaves, template.structure)


class Attribute:
    """An attribute of a module that each call of a block sets anew.

    Args:
        name: where a user finds it.
        module, key: the module and the attribute's name.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.key = name, key
        self._entries = vars(module)  # not the module: a stage would then hold its parameters twice
        self._last: Callable[[], Tensor | None] = lambda: None

    def take(self) -> Tensor:
        """The value that the latest call left. Raises PartitionError if it left none."""
        value = self._entries.get(self.key)
        if not isinstance(value, Tensor) or value is self._last():
            raise PartitionError(
                f"{self.name!r} was set by the call in which the model was recorded, but not by this one: set it to a "
                "tensor in every forward"
            )
        self._last = weakref.ref(value)
        return value


def taken(result: Any, attribute: Attribute) -> Tensor:
    """What the call that returned `result` left in an attribute."""
    return attribute.take()


def attributes_of(block: nn.Module, name: str, taken: Collection[str]) -> Iterator[tuple[Attribute, Tensor]]:
    """The attributes of a block's modules that hold tensors to take, apart from parameters and buffers.

    These are tensors that require a gradient, and the attributes in `taken`, which did so in another recording: the
    loss of an evaluation reads them too.
    """
    for inner, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (value.requires_grad or f"{inner}.{key}" in taken):
                yield Attribute(f"{inner}.{key}", module, key), value
