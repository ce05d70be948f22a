"""The dtype in which gradients accumulate: torch's `Tensor.grad_dtype`, the parameter's own dtype unless it is set.

Autograd casts each use's term to it before it adds them, and whatever else adds to `.grad` does the same: so a tied
parameter's gradient is the same sum wherever the cuts lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.runtime.gradients.distribution import mesh_dimensions


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's `.grad`."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if dtype is None else dtype


def checked_dtype(dtype: object) -> torch.dtype | None:
    """`gradient_dtype=`, checked.

    Raises:
        ArgumentError: no dtype to accumulate in, or this torch accumulates in the parameter's own dtype alone.
    """
    if dtype is None:
        return None
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"gradient_dtype={dtype!r}: expected torch.float32, torch.float64 or None")
    if not hasattr(Tensor, "grad_dtype"):
        raise ArgumentError(
            f"gradient_dtype={dtype}: torch {torch.__version__} has no Tensor.grad_dtype, so that .grad has the "
            "parameter's dtype; install torch 2.11 or later, or leave gradient_dtype out"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def accumulate_in(dtype: torch.dtype, named: Iterable[tuple[str, Tensor]], divided: Sequence[str]) -> None:
    """Lets the gradients of parameters in lower precision accumulate in `dtype`; those already there are cast.

    Args:
        named: the parameters and their names.
        divided: the mesh dimensions along which the batch is divided.

    Raises:
        ArgumentError: `fully_shard` sums a parameter's gradient itself.
    """
    lower = [(n, p) for n, p in named if p.is_floating_point() and gradient_dtype(p).itemsize < dtype.itemsize]
    for name, parameter in lower:
        if set(divided) & set(mesh_dimensions(parameter)):
            raise ArgumentError(
                f"gradient_dtype={dtype}: fully_shard has sharded {name!r}, which is in {parameter.dtype}, and adds up "
                "its gradient itself; leave gradient_dtype out, keep the parameters in torch.float32, and give "
                "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            )
    for _, parameter in lower:
        grad, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if grad is None else grad.to(dtype)
