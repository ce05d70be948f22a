"""What a block leaves in attributes of its own modules and others read: an auxiliary loss, `self.l_aux = ...`.

Most such blocks are opened, so that nothing is left anywhere (`run/sideways.py`). One that depends on values must run
as a whole: its value is taken out of the attribute right after the call, and from then on is a value like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from penstock.errors import PartitionError


class Attribute:
    """An attribute of a module that each call of a block sets anew.

    Args:
        name: how the model's user finds it.
        module, key: where it is.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.key = name, key
        self._entries = vars(module)  # no module, whose parameters a stage would hold twice
        self._last: Callable[[], Tensor | None] = lambda: None

    def take(self) -> Tensor:
        """The value that the call just made has left. Raises PartitionError if it has left none."""
        value = self._entries.get(self.key)
        if not isinstance(value, Tensor) or value is self._last():
            raise PartitionError(
                f"{self.name!r} was set by the call in which the model was recorded, but not by this one: set it to a "
                "tensor in every forward"
            )
        self._last = weakref.ref(value)
        return value


def taken(result: Any, attribute: Attribute) -> Tensor:
    """What the call that returned `result` has left in an attribute."""
    return attribute.take()


def attributes_of(block: nn.Module, name: str, taken: Collection[str]) -> Iterator[tuple[Attribute, Tensor]]:
    """The attributes of a block's modules, parameters and buffers aside, that hold tensors which take a gradient or, as
    those in `taken`, have done so in another recording: an evaluation's loss reads them, too."""
    for inner, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (value.requires_grad or f"{inner}.{key}" in taken):
                yield Attribute(f"{inner}.{key}", module, key), value
