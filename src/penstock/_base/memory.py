"""Where tensors are in memory, and whether two of them overlap."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import torch
from torch import Tensor

from penstock._base.compat import storage_id
from penstock._base.stages import TensorMeta


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last, including gaps. Strides are not negative."""
    if 0 in shape:
        return 0
    return 1 + sum(step * (size - 1) for size, step in zip(shape, stride, strict=True))


def meta_bytes(meta: TensorMeta) -> int:
    """Return the size of a value, in bytes."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return prod(meta.shape) * dtype.itemsize


def overlap(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element at the same address. Different columns of one tensor do not."""
    if tensor is other:
        return True
    if tensor.layout != torch.strided or other.layout != torch.strided:
        return storage_id(tensor) == storage_id(other)
    if tensor.device != other.device or tensor.is_meta or not (tensor.numel() and other.numel()):
        return False
    first, second = _addresses(tensor), _addresses(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    start, unit = min(first.start, second.start), gcd(tensor.itemsize, other.itemsize, first.start - second.start)
    touched = torch.zeros((max(first.stop, second.stop) - start) // unit, dtype=torch.bool)
    _view(touched, tensor, first.start - start, unit).fill_(True)
    return bool(_view(touched, other, second.start - start, unit).any())


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, NaNs included. True if they are on the meta device, or sparse."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if tensor.is_meta or other.is_meta or tensor.layout != torch.strided:
        return True
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other)))


def _addresses(tensor: Tensor) -> range:
    size = extent(tensor.size(), tensor.stride()) * tensor.itemsize
    return range(tensor.data_ptr(), tensor.data_ptr() + size)


def _view(memory: Tensor, tensor: Tensor, start: int, unit: int) -> Tensor:
    """Return a tensor's part of `memory`, which has one element for each unit of bytes."""
    size = tensor.itemsize // unit
    strides = [step * size for step in tensor.stride()]
    return torch.as_strided(memory, (*tensor.shape, size), (*strides, 1), start // unit)
