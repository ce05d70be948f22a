"""Distributed tensors, of which each process holds a part, and the dtype in which gradients accumulate.

torch's `DTensor` is slow to import. `_base.gradients` says what follows from `gradient_dtype=`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock._base.gradients import gradient_dtype
from penstock.runtime.front_end import Stage


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def parallelized_by(root: nn.Module, *packages: str) -> str:
    """The first module that torch's `fully_shard` or `replicate` gave a class of these packages; empty if there is
    none. Imports no FSDP, which is slow."""
    for name, module in root.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(packages):
                return f"module {name!r}, now {type(module).__name__}" if name else type(module).__name__
    return ""


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is distributed."""
    mine: Tensor = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return mine


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A collective if it is distributed."""
    full: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return full


def on_host(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Scalars on the CPU: those of one device and dtype travel together, so that the host waits once."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, number in enumerate(numbers):
        groups.setdefault((number.device, number.dtype), []).append(place)
    found = list(numbers)
    for places in groups.values():
        for place, number in zip(places, torch.stack([numbers[place] for place in places]).cpu(), strict=True):
            found[place] = number.clone()  # a view would travel with all the others
    return found


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copies a value into a tensor of which this process may hold only a part. Needs no communication.

    For such a tensor the value is either whole or distributed in the same way.
    """
    if is_distributed(tensor) and not is_distributed(value):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        value = distribute_tensor(value.to(tensor.device), mesh, placements, src_data_rank=None)
    tensor.copy_(value)


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This process's part of a parameter's gradient, divided like the parameter.

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
    """The names of the mesh dimensions over which a tensor is distributed; none if it is not."""
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_distributed(tensor) else ()  # type: ignore[attr-defined]


def check_sharding(stage: Stage, divided: Sequence[str], shared: Mapping[str, Sequence[int]]) -> None:
    """Refuses a sharding that would make gradients wrong.

    Args:
        stage: a stage to which the user's function has been applied.
        divided: the mesh dimensions along which the batch is divided.
        shared: the parameters that several stages hold, with those stages.

    Raises:
        ArgumentError: a parameter is distributed over a mesh without names, over only some of `divided`, or although
            several stages hold it.
    """
    for name, parameter in stage.parameters.items():
        if not is_distributed(parameter):
            continue
        over = mesh_dimensions(parameter)
        left = [dimension for dimension in divided if dimension not in over]
        if not over:
            raise ArgumentError(
                f"parallelize distributed {name!r} over a mesh without mesh_dim_names; give it a part of the "
                "pipeline's mesh, such as mesh['dp']"
            )
        if name in shared:
            raise ArgumentError(
                f"parallelize distributed {name!r}, which stages {list(shared[name])} share; leave it whole "
                "(fully_shard(..., ignored_params={...})), or choose cuts that keep its uses on one stage"
            )
        if left and len(left) < len(divided):
            raise ArgumentError(
                f"parallelize sharded {name!r} over {over}, but the batch is divided along {left[0]!r} as well, where "
                f"nothing would add its gradients up; shard over {tuple(divided)} together, as mesh[{tuple(divided)}]"
            )


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
