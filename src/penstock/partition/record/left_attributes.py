"""Attributes in which a block leaves a tensor for others (`self.l_aux = ...`), as values of a recording.

Most such blocks are opened, so that nothing is left anywhere (`side_effects`). One that depends on values must run as a
whole: right after the call, its value is taken out of the attribute, and is then a value like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from penstock._base.errors import PartitionError


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
        """Return the value that the latest call left. Raise PartitionError if it left none."""
        value = self._entries.get(self.key)
        if not isinstance(value, Tensor) or value is self._last():
            raise PartitionError(
                f"{self.name!r} was set by the call in which the model was recorded, but not by this one: set it to a "
                "tensor in every forward"
            )
        self._last = weakref.ref(value)
        return value


def taken(result: Any, attribute: Attribute) -> Tensor:
    """Return what the call that returned `result` left in an attribute."""
    return attribute.take()


def find_attributes(block: nn.Module, name: str, taken_names: Collection[str]) -> Iterator[tuple[Attribute, Tensor]]:
    """Yield the attributes of a block's modules that hold tensors to take, apart from parameters and buffers.

    These are tensors that require a gradient, and the attributes in `taken_names`, which did so in another recording:
    the loss of an evaluation reads them too.
    """
    for inner, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (value.requires_grad or f"{inner}.{key}" in taken_names):
                yield Attribute(f"{inner}.{key}", module, key), value
