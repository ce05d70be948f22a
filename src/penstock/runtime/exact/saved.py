"""A tensor that is read again later, and must not be updated in place until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Saved(Protocol):
    """A tensor that waits for backward, wherever it is."""

    def get(self) -> Tensor:
        """The tensor, on its device. Raises RuntimeError, as autograd does, if it was updated in place since."""


class Keeper(Protocol):
    """Keeps what a forward saves for backward, instead of autograd."""

    @property
    def pack(self) -> Callable[[Tensor], Any]:
        """The hook that is given what autograd saves."""

    def save(self, tensor: Tensor) -> Saved:
        """Keeps what W needs."""


class SavedTensor(NamedTuple):
    """A tensor without its graph, in the same memory, so that whatever it was computed from can be freed.

    Attributes:
        version: autograd's count of in-place updates of the tensor.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """The tensor as it is now."""
        return cls(tensor.detach(), tensor._version)

    def get(self) -> Tensor:
        """The tensor. Raises RuntimeError, as autograd does, if it was updated in place since."""
        check_unchanged(self.tensor, self.version, self.tensor.shape)
        return self.tensor


def check_unchanged(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """Raises RuntimeError, as autograd does, if a tensor that backward needs has another version than it had."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(shape)} that is needed for a gradient has been modified by an inplace operation: "
            f"it is at version {tensor._version}; expected version {version}"
        )
