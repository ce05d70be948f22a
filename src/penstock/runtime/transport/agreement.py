"""What the two ends of a channel agreed on in their first step: the layout of every tensor of every message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.gradients import CACHE_LINE_BYTES
from penstock._base.stages import Link
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.protocol import Message

Layouts = list[Layout | None]
"""The layouts of a message's tensors; None where there is no tensor."""


class Agreement:
    """The layouts of a channel's messages, by microbatch. `learning`: true in the first step, or always if the link
    varies.
    """

    def __init__(self, link: Link) -> None:
        self.learning = True
        self._link = link
        self._layouts: dict[int, Layouts] = {}

    def __getitem__(self, microbatch: int) -> Layouts:
        return self._layouts[microbatch]

    def all(self) -> Iterable[Layouts]:
        """Return the layouts of every message."""
        return self._layouts.values()

    def learn(self, microbatch: int, layouts: Layouts) -> None:
        """Record the layouts of a message as agreed."""
        self._layouts[microbatch] = layouts

    def check(self, microbatch: int, message: Message) -> Layouts:
        """Return the layouts of a message to send. They are learned in the first step, and compared with those in later
        ones.

        Raises:
            ShapeError: a layout is not as agreed.
        """
        if self.learning:
            self._layouts[microbatch] = [None if tensor is None else Layout.of(tensor) for tensor in message]
            return self._layouts[microbatch]
        agreed = self._layouts[microbatch]
        for tensor, layout in zip(message, agreed, strict=True):
            if tensor is None or layout is None:
                fits = tensor is None and layout is None
            else:  # `Layout.of`, and a comparison, in a third of the time
                fits = (
                    tensor.stride() == layout.stride
                    and tensor.shape == layout.shape
                    and tensor.dtype is layout.dtype
                    and tensor.requires_grad is layout.requires_grad
                    and tensor.data_ptr() % CACHE_LINE_BYTES == layout.misalignment
                )
            if not fits:
                break
        else:
            return agreed
        layouts = [None if tensor is None else Layout.of(tensor) for tensor in message]
        if not all(map(_same_layout, layouts, agreed)):
            raise ShapeError(self._difference(microbatch, layouts))
        return agreed

    def drop_step(self) -> None:
        """Discard what was agreed in a first step that raised."""
        if self.learning:
            self._layouts.clear()

    def end_step(self) -> bool:
        """End a step. Return whether it was the first step with messages."""
        ended = self.learning and bool(self._layouts) and not self._link.varies
        self.learning = self.learning and not ended
        return ended

    def _difference(self, microbatch: int, layouts: Layouts) -> str:
        changes = zip(self._link.values, layouts, self._layouts[microbatch], strict=True)
        (stage, name), new, old = next(change for change in changes if not _same_layout(*change[1:]))
        if new is None or old is None:
            before, now = ("none", "one") if old is None else ("one", "none")
            return (
                f"the gradient of value {name!r} of stage {stage} goes from stage {self._link.source} to "
                f"{self._link.target} in each step or in none, but there was {before} in the first step, and there is "
                f"{now} now in microbatch {microbatch}. Nothing was sent. Where a block detaches what it returns for "
                "some batches alone, use torch.where(condition, h, h.detach()), which always takes a gradient, or "
                "move the cut"
            )
        return (
            f"value {name!r} of stage {stage}, on its way from stage {self._link.source} to {self._link.target} in "
            f"microbatch {microbatch}, is {describe(new)}; {describe(old)} was agreed on in the first step. "
            "Nothing was sent. Keep shapes the same, or make a pipeline for the new ones."
        )


def _same_layout(first: Layout | None, second: Layout | None) -> bool:
    """Whether two layouts are the same, apart from the stride of a dimension with one element.

    That stride changes between steps: autograd adds the gradients of several uses in the memory of one or another. It
    matters only if torch takes the tensor for channels-first with one stride and channels-last with the other.
    """
    if first is None or second is None:
        return first is second
    if first.stride == second.stride:
        return first == second
    return _without_idle_strides(first) == _without_idle_strides(second) and (
        is_channels_last(first.shape, first.stride) == is_channels_last(second.shape, second.stride)
    )


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether torch takes images or volumes with these strides for channels-last, and chooses kernels accordingly.

    The rule of `is_channels_last_strides_2d` and `_3d` (c10/core/MemoryFormat.h).
    """
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    min_stride = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or stride[dim] < min_stride or (dim == 0 and min_stride == stride[1]):
            return False
        min_stride = stride[dim] * max(shape[dim], 1)
    return True


def _without_idle_strides(layout: Layout) -> Layout:
    pairs = zip(layout.shape, layout.stride, strict=True)
    return layout._replace(stride=tuple(0 if size == 1 else step for size, step in pairs))


def describe(layout: Layout | None) -> str:
    """Describe a layout in words."""
    if layout is None:
        return "absent"
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{dtype}{list(layout.shape)} with strides {list(layout.stride)}"


def to_bytes(tensor: Tensor) -> bytes:
    """Return the elements of a tensor, on any device, in storage order."""
    return exact.pack(tensor).cpu().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, layout: Layout, device: torch.device) -> Tensor:
    """Make a tensor from these bytes, in its own memory, with the layout that it had when `to_bytes` was called."""
    buffer = exact.allocate(layout, device)
    if data:
        buffer.flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return exact.unpack(buffer)
