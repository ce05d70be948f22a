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


def gradient_dtype(parameter: Tensor, asked: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`.

    Args:
        asked: the `grad_dtype=` of a pipeline that has not set it on the parameter (yet): it lifts those of lower
            precision, and leaves others alone.
    """
    own: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    dtype = parameter.dtype if own is None else own
    is_lower = asked is not None and parameter.is_floating_point() and dtype.itemsize < asked.itemsize
    return asked if asked is not None and is_lower else dtype


def gradient_bytes(parameters: Iterable[Tensor], asked: torch.dtype | None = None) -> int:
    """Return the size of the gradients of some parameters. `asked`: see `gradient_dtype`."""
    return sum(parameter.numel() * gradient_dtype(parameter, asked).itemsize for parameter in parameters)


def slot_elements(elements: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a gradient in a buffer of sums, in which each begins at a cache line, as a
    tensor of its own does.

    Kernels for other addresses would first run in the second step's backward. CUDA loads a kernel when it first runs,
    once all that run have ended, and among these are receives: two ranks that await each other's gradients would hang.
    """
    unit = CACHE_LINE_BYTES // dtype.itemsize
    return -(-elements // unit) * unit


def summed_bytes(parameters: Iterable[Tensor], asked: torch.dtype | None = None) -> int:
    """Return the size of what each process sends to sum its gradients with others': the gradients, and one number for
    each, which says whether it is there. `asked`: see `gradient_dtype`."""
    dtypes = [(parameter, gradient_dtype(parameter, asked)) for parameter in parameters]
    return sum((slot_elements(parameter.numel(), dtype) + 1) * dtype.itemsize for parameter, dtype in dtypes)


def by_gradient_dtype(parameters: Iterable[P], asked: torch.dtype | None = None) -> dict[torch.dtype, list[P]]:
    """Group the parameters by the dtype of their gradients, which are summed separately. `asked`: see
    `gradient_dtype`."""
    found: dict[torch.dtype, list[P]] = {}
    for parameter in parameters:
        found.setdefault(gradient_dtype(parameter, asked), []).append(parameter)
    return found


def buckets(
    parameters: Iterable[P], most_bytes: int = BUCKET_BYTES, asked: torch.dtype | None = None
) -> Iterator[list[P]]:
    """Group parameters into buckets: their gradients have one dtype, and at most `most_bytes` unless there is one."""
    for same in by_gradient_dtype(parameters, asked).values():
        bucket: list[P] = []
        filled = 0
        for parameter in same:
            size = gradient_bytes([parameter], asked)
            if bucket and filled + size > most_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += size
        if bucket:
            yield bucket


def checked_dtype(dtype: object) -> torch.dtype | None:
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
