"""A tensor that is read again later, and must not be updated in place until then."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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

    @property
    def is_changed(self) -> bool:
        """Whether it has been updated in place since."""
        return self.tensor._version != self.version

    def get(self) -> Tensor:
        """The tensor. Raises RuntimeError, as autograd does, if it was updated in place since."""
        if self.is_changed:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that is needed for a weight's gradient has been modified "
                f"by an inplace operation: it is at version {self.tensor._version}; expected version {self.version}"
            )
        return self.tensor
