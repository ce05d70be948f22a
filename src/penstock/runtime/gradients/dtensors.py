"""Distributed tensors, of which each process holds a part, and the dtype in which gradients accumulate.

torch's `DTensor` is slow to import. See `_base.gradients` for the consequences of `grad_dtype=`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.gradients import gradient_dtype


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it, unless it is distributed."""
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return part


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. A collective if it is distributed."""
    full: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return full


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of which this process may hold only a part. Needs no communication.

    For such a tensor the value is either whole or distributed in the same way.
    """
    if is_distributed(tensor) and not is_distributed(value):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        value = distribute_tensor(value.to(tensor.device), mesh, placements, src_data_rank=None)
    tensor.copy_(value)


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return this process's part of a parameter's gradient, divided like the parameter.

    A collective if the gradient is not divided like that: for a parameter that sequence parallelism leaves whole, each
    process has one term of the gradient (`Partial`).
    """
    grad = parameter.grad
    if grad is None:
        return None
    grad = grad.detach()
    if is_distributed(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local(grad)


def mesh_dimensions(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh dimensions over which a tensor is distributed; none if it is not."""
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_distributed(tensor) else ()  # type: ignore[attr-defined]


def accumulate_in(dtype: torch.dtype, named: Iterable[tuple[str, Tensor]], divided: Sequence[str]) -> None:
    """Let the gradients of parameters in lower precision accumulate in `dtype`; those already there are cast.

    Args:
        named: the parameters and their names.
        divided: the mesh dimensions along which the batch is divided.

    Raises:
        ArgumentError: `fully_shard` sums a parameter's gradient itself.
    """
    lower = [(n, p) for n, p in named if gradient_dtype(p, dtype) != gradient_dtype(p)]
    for name, parameter in lower:
        if set(divided) & set(mesh_dimensions(parameter)):
            raise ArgumentError(
                f"grad_dtype={dtype}: fully_shard has sharded {name!r}, which is in {parameter.dtype}, and adds up "
                "its gradient itself; omit grad_dtype=, keep the parameters in torch.float32, and pass "
                "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            )
    for _, parameter in lower:
        grad, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if grad is None else grad.to(dtype)
