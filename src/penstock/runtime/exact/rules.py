"""What keeps a pipelined step equal to the unsplit one, bit for bit: the rules, each in one place.

Every rule was found by experiment. Break one and bits change: tests/runtime/exact/test_rules.py breaks each on purpose.

1. A stage's weight gradients accumulate in ascending order of microbatch. The schedule decides this;
   `penstock.schedule.check` reports one that does not as inexact.
2. The gradients of all uses of a parameter within one microbatch are summed first, then added to `.grad` once: one
   `backward` call takes all roots of a stage together. If the backward is split, a parameter with any use that cannot
   wait for W does not wait at all, and the terms of those that wait are added in autograd's order
   (`penstock.runtime.split_backward.backward`).
3. The loss is scaled by the seed of its backward (`seeds`), never by dividing gradients afterwards.
4. The gradient of a value that several stages use comes back from the last consumer to the one before it, and is a
   root of that stage's backward, so that it is the first term of the sum there (`backward`).
5. Strides, and the address modulo a cache line, survive a cut (`Layout`), for values and gradients alike; every
   microbatch has its own allocation (`copy_aligned`). At another address BLAS takes another path, with other bits.
6. A received tensor may be updated in place (`Receive` hands the buffer on as a value that is not a leaf).
7. Random streams are keyed by seed, step, microbatch and module: `penstock.runtime.exact.streams`.
8. Backward runs outside autocast (`outside_autocast`), as it does after `with torch.autocast(...): loss = ...`.
   Under autocast, products that the forward made in float32 would get gradients in half precision.
9. W computes a product before it adds it to `.grad`, as autograd does (`computes_apart`). BLAS, told to add it, adds
   each block of the inner dimension on its own. Only on the CPU are bits promised; elsewhere W adds in place.
10. What waits to be sent or read is in memory that nothing else may write into (`detach_or_copy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock._base.compat import any_autocast, holders, run_backward, storage_id
from penstock._base.gradients import CACHE_LINE_BYTES
from penstock._base.memory import extent


class Receive(torch.autograd.Function):
    """Passes a received buffer on as a value of this stage's graph, and keeps the gradient that comes back for it.

    The gradient is kept as autograd made it. A leaf's `.grad` would not do: it is copied into the leaf's own strides,
    and a leaf cannot be updated in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], slot: list[Tensor]) -> Tensor:
        # The buffer comes in a list: as an argument it would become a view of itself, which refuses in-place updates.
        ctx.slot = slot
        return box[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.slot.append(grads[0])
        return None, None, None


def as_graph_input(anchor: Tensor, buffer: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a value to compute with, on `buffer`'s memory, and the slot in which its gradient appears after backward.

    `anchor` is any tensor that requires a gradient: it makes autograd record the value.
    """
    slot: list[Tensor] = []
    return _receive(anchor, [buffer], slot), slot


_receive: Callable[[Tensor, list[Tensor], list[Tensor]], Tensor] = super(torch.autograd.Function, Receive).apply
"""`Receive.apply` without what it does for functorch's transforms, which takes longer than the rest."""


def backward(roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run one backward from all of a stage's roots: its loss or outputs, and the inputs that later stages use too.

    An input that is a root gets its later consumers' gradient before this stage's own terms are added, which is the
    order in which autograd adds them in the unsplit model.
    """
    if any_autocast():
        with outside_autocast(grads[0].device.type):
            run_backward(roots, grads)
    else:
        run_backward(roots, grads)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn autocast off for part of a backward, in a step that runs under it."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else NOTHING


class _NullContext:
    """`nullcontext` without calls of Python: it enters and leaves by functions in C, which do nothing here."""

    __enter__ = [].clear
    __exit__ = "".format  # takes any arguments, and returns an empty text, so that exceptions pass


NOTHING = cast(AbstractContextManager[Any], _NullContext())
"""What wraps something that needs nothing around it; may be entered any number of times."""


def computes_apart(device: torch.device) -> bool:
    """Whether W needs memory for a product that it adds to `.grad`, to have autograd's bits."""
    return device.type == "cpu"


def seeds(weights: Sequence[float], total: float | None = None) -> list[float]:
    """Return the factor for each microbatch's loss: its weight over the sum of all weights, ascending by microbatch."""
    total = sum(weights) if total is None else total
    return [weight / total for weight in weights]


def copy_aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor into its own aligned allocation, with the same strides (a slice of a batch has neither)."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.detach().clone()
    return copy_as(Layout.of(tensor)._replace(misalignment=0), tensor)


def copy_parts_aligned(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
    """`copy_aligned` for each of the parts into which the first dimension is cut; None unless all of them are dense."""
    (_, *tail), stride = tensor.shape, tensor.stride()
    dense = all(is_dense((size, *tail), stride) for size in {*sizes})
    return [part.clone() for part in torch.split(tensor.detach(), list(sizes))] if dense else None


class CopyAligned(torch.autograd.Function):
    """`copy_aligned`, through which a gradient goes back to where the caller's tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copy_aligned(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Layout(NamedTuple):
    """How a tensor is laid out in memory: all that a kernel's choice of path, and so its bits, may depend on.

    Shape and stride are in elements; misalignment is in bytes past a cache line.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    misalignment: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of `tensor`."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.data_ptr() % CACHE_LINE_BYTES,
            tensor.requires_grad,
        )


class Buffer(NamedTuple):
    """Memory for a tensor of a given layout: `flat` is what is sent (1-D, contiguous), `tensor` is what is used."""

    tensor: Tensor
    flat: Tensor
    packed: bool
    """Whether `flat` is separate memory, which `unpack` copies into `tensor` once it has arrived."""


def detach_or_copy(values: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors without their graphs, in the same list, with any conjugation or negation that torch has put off
    carried out. Whatever else holds a tensor's memory by then (a module with static results, as of CUDA graphs, `out=`
    or scratch memory) may write into it before the tensor has been sent or read, so that it is copied.
    """
    nodes = [None if value is None else value.grad_fn for value in values]
    for index in range(len(values)):  # all first: a view that still has its graph holds its base's memory
        if values[index] is not None:  # `enumerate` would hold on to the tensor, and so would `detach`
            values[index] = values[index].data.resolve_conj().resolve_neg()  # type: ignore[union-attr]
    for index, node in enumerate(nodes):
        value = values[index]
        if value is None or (references := holders(value, node)) == 1:
            continue
        if references > sum(peer is not None and storage_id(peer) == storage_id(value) for peer in values):
            values[index] = copy_as(Layout.of(value), value)
    return values


def pack(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a 1-D contiguous tensor in storage order; a view of it if it is dense."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if is_dense(shape, stride):
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    packed = _unexpanded(tensor.detach()).contiguous()
    return packed.as_strided((packed.numel(),), (1,), packed.storage_offset())  # for one element, `view` keeps stride 0


def allocate(layout: Layout, device: torch.device, *, pinned: bool = False) -> Buffer:
    """Fresh memory for one tensor of this layout. `pinned`: the host's, to copy from or to without waiting."""
    shape, stride, dtype, misalignment, _ = layout
    skip = misalignment // dtype.itemsize
    if is_dense(shape, stride) and not skip:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device, pin_memory=pinned)
        return Buffer(tensor, tensor.as_strided((tensor.numel(),), (1,)), packed=False)
    if is_dense(shape, stride):
        flat = torch.empty(prod(shape) + skip, dtype=dtype, device=device, pin_memory=pinned)
        tensor = share_memory(flat, skip, shape, stride)
        return Buffer(tensor, flat[skip:], packed=False)
    narrow = _narrow(shape, stride)
    if is_overlapping(narrow, stride):  # such a tensor cannot be written to: use a contiguous one
        return Buffer(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(prod(shape), dtype=dtype, device=device, pin_memory=pinned),
            packed=True,
        )
    memory = torch.empty(extent(narrow, stride) + skip, dtype=dtype, device=device)
    flat = torch.empty(prod(narrow), dtype=dtype, device=device, pin_memory=pinned)
    return Buffer(share_memory(memory, skip, shape, stride), flat, packed=True)


def share_memory(memory: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a tensor on another's memory, yet not a view of it: autograd refuses to update views that `Receive`
    returns."""
    return torch.empty(0, dtype=memory.dtype, device=memory.device).set_(
        memory.untyped_storage(), offset, shape, stride
    )


def flat_bytes(layout: Layout) -> int:
    """Return the bytes sent for a tensor of this layout: the size of what `pack` returns."""
    shape, stride = layout.shape, layout.stride
    if not is_dense(shape, stride):
        narrow = _narrow(shape, stride)
        shape = shape if is_overlapping(narrow, stride) else narrow
    return prod(shape) * layout.dtype.itemsize


def unpack(buffer: Buffer) -> Tensor:
    """Return the tensor in a buffer whose `flat` has been filled."""
    if buffer.packed:
        target = _unexpanded(buffer.tensor)
        target.copy_(buffer.flat.view(target.shape))
    return buffer.tensor


def copy_as(
    layout: Layout, tensor: Tensor, device: torch.device | None = None, *, non_blocking: bool = False
) -> Tensor:
    """Copy `tensor` into fresh memory with this layout, on `device` (default: where it is)."""
    device = tensor.device if device is None else device
    shape, stride, dtype, misalignment, _ = layout
    if not misalignment and tensor.stride() == stride and tensor.shape == shape and is_dense(shape, stride):
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if type(tensor) is Tensor and tensor.device == device and tensor.dtype is dtype:
            return tensor.clone()
        copy = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return copy.copy_(tensor, non_blocking=non_blocking)
    buffer = allocate(layout, device)
    buffer.flat.copy_(pack(tensor), non_blocking=non_blocking)
    return unpack(buffer)


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlap, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=4096)
def is_overlapping(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share an address."""
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _unexpanded(tensor: Tensor) -> Tensor:
    """`tensor` with each expanded dimension (stride 0) narrowed to one, unless elements overlap in other ways too."""
    narrow = tensor
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            narrow = narrow.narrow(dim, 0, 1)
    return tensor if is_overlapping(tuple(narrow.shape), narrow.stride()) else narrow


def _narrow(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))


class Saved(Protocol):
    """A tensor that waits for backward, wherever it is."""

    def get(self) -> Tensor:
        """Return the tensor, on its device. Raise RuntimeError, as autograd does, if it was updated in place since."""


@runtime_checkable
class Keeper(Protocol):
    """Keeps what a forward saves for backward, instead of autograd."""

    @property
    def pack(self) -> Callable[[Tensor], Any]:
        """The hook that is given what autograd saves."""

    def save(self, tensor: Tensor) -> Saved:
        """Keep what W needs."""

    def save_argument(self, tensor: Tensor, microbatch: int) -> Saved | None:
        """Keep what a second run of a microbatch's forward needs; None if it had better stay as it is."""


class SavedTensor(NamedTuple):
    """A tensor without its graph, in the same memory, so that whatever it was computed from can be freed.

    Attributes:
        version: autograd's count of in-place updates of the tensor.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """Save the tensor as it is now."""
        return cls(tensor.detach(), tensor._version)

    def get(self) -> Tensor:
        """Return the tensor. Raise RuntimeError, as autograd does, if it was updated in place since."""
        check_unchanged(self.tensor, self.version, self.tensor.shape)
        return self.tensor


def check_unchanged(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """Raise RuntimeError, as autograd does, if a tensor that backward needs has another version than it had."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(shape)} that is needed for a gradient has been modified by an inplace operation: "
            f"it is at version {tensor._version}; expected version {version}"
        )
