"""Sets the dtype in which gradients accumulate (`gradient_dtype=`); `_base.gradients` says what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock._base.gradients import gradient_dtype
from penstock.errors import ArgumentError
from penstock.runtime.gradients.distribution import mesh_dimensions


def accumulate_in(dtype: torch.dtype, named: Iterable[tuple[str, Tensor]], divided: Sequence[str]) -> None:
    """Lets the gradients of parameters in lower precision accumulate in `dtype`; those already there are cast.

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
                f"gradient_dtype={dtype}: fully_shard has sharded {name!r}, which is in {parameter.dtype}, and adds up "
                "its gradient itself; leave gradient_dtype out, keep the parameters in torch.float32, and pass "
                "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            )
    for _, parameter in lower:
        grad, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if grad is None else grad.to(dtype)
