"""What parameters' gradients are made of: the dtype in which each accumulates, its size, and the buckets in which
gradients are summed over replicas. The runtime sums by these rules; predictions of traffic and memory count by them.

The dtype is torch's `Tensor.grad_dtype`: the parameter's own unless it is set. Autograd casts each use's term to it
before it adds them, and whatever else adds to `.grad` does the same: so a tied parameter's gradient is the same sum
wherever the cuts lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError

P = TypeVar("P", bound=Tensor)

CACHE_LINE_BYTES = 64
BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: large enough to use a link's full rate, small enough to overlap with later buckets."""


def gradient_dtype(parameter: Tensor, grad_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`.

    Args:
        grad_dtype: the pipeline's `grad_dtype=`, if it is not set on the parameter (yet): it raises dtypes of lower
            precision and leaves the others alone.
    """
    stated: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    dtype = parameter.dtype if stated is None else stated
    is_lower = grad_dtype is not None and parameter.is_floating_point() and dtype.itemsize < grad_dtype.itemsize
    return grad_dtype if grad_dtype is not None and is_lower else dtype


def gradient_bytes(parameters: Iterable[Tensor], grad_dtype: torch.dtype | None = None) -> int:
    """Return the size of the gradients of some parameters. `grad_dtype`: see `gradient_dtype`."""
    return sum(parameter.numel() * gradient_dtype(parameter, grad_dtype).itemsize for parameter in parameters)


def slot_elements(elements: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a gradient in a buffer of sums, in which each begins at a cache line, as a
    tensor of its own does.

    Kernels for other addresses would first run in the second step's backward. CUDA loads a kernel when it first runs,
    once all that run have ended, and among these are receives: two ranks that await each other's gradients would hang.
    """
    unit = CACHE_LINE_BYTES // dtype.itemsize
    return -(-elements // unit) * unit


def all_reduce_bytes(parameters: Iterable[Tensor], grad_dtype: torch.dtype | None = None) -> int:
    """Return the size of what each process sends to all-reduce its gradients: the gradients, and one number for
    each, whether it exists. `grad_dtype`: see `gradient_dtype`."""
    dtypes = [(parameter, gradient_dtype(parameter, grad_dtype)) for parameter in parameters]
    return sum((slot_elements(parameter.numel(), dtype) + 1) * dtype.itemsize for parameter, dtype in dtypes)


def group_by_gradient_dtype(
    parameters: Iterable[P], grad_dtype: torch.dtype | None = None
) -> dict[torch.dtype, list[P]]:
    """Group the parameters by the dtype of their gradients, which are summed separately. `grad_dtype`: see
    `gradient_dtype`."""
    groups: dict[torch.dtype, list[P]] = {}
    for parameter in parameters:
        groups.setdefault(gradient_dtype(parameter, grad_dtype), []).append(parameter)
    return groups


def buckets(
    parameters: Iterable[P], max_bytes: float = BUCKET_BYTES, grad_dtype: torch.dtype | None = None
) -> Iterator[list[P]]:
    """Group parameters into buckets of one gradient dtype and at most `max_bytes`, or of a single larger parameter."""
    for group in group_by_gradient_dtype(parameters, grad_dtype).values():
        bucket: list[P] = []
        filled = 0
        for parameter in group:
            size = gradient_bytes([parameter], grad_dtype)
            if bucket and filled + size > max_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += size
        if bucket:
            yield bucket


def check_grad_dtype(dtype: object) -> torch.dtype | None:
    """`grad_dtype=`, checked.

    Raises:
        ArgumentError: no dtype to accumulate in.
    """
    if dtype is None:
        return None
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"grad_dtype={dtype!r}: expected torch.float32, torch.float64 or None")
    assert isinstance(dtype, torch.dtype)
    return dtype
