"""Distributed tensors, of which each process holds a part, stages that `fully_shard` was applied to, and the dtype in
which gradients accumulate.

torch's `DTensor` is slow to import. See `_base.gradients` for the consequences of `grad_dtype=`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import reduction_dtype
from penstock._base.errors import ArgumentError
from penstock._base.gradients import gradient_dtype
from penstock.runtime.front_end import Stage


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def parallelized_by(root: nn.Module, *packages: str) -> str:
    """Return the first module that torch's `fully_shard` or `replicate` gave a class of these packages; empty if there
    is none. Import no FSDP, which is slow."""
    for name, module in root.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(packages):
                return f"module {name!r}, now {type(module).__name__}" if name else type(module).__name__
    return ""


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it, unless it is distributed."""
    part: Tensor = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return part


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. A collective if it is distributed."""
    full: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return full


def on_host(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Bring scalars to the CPU: those of one device and dtype travel together, so that the host waits once."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, number in enumerate(numbers):
        groups.setdefault((number.device, number.dtype), []).append(index)
    results = list(numbers)
    for indices in groups.values():
        for index, number in zip(indices, torch.stack([numbers[index] for index in indices]).cpu(), strict=True):
            results[index] = number.clone()  # a view would travel with all the others
    return results


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


def check_sharding(stage: Stage, divided: Sequence[str], shared: Mapping[str, Sequence[int]]) -> None:
    """Refuse a sharding that would make gradients wrong.

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
        missing = [dimension for dimension in divided if dimension not in over]
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
        if missing and len(missing) < len(divided):
            raise ArgumentError(
                f"parallelize sharded {name!r} over {over}, but the batch is divided along {missing[0]!r} as well, "
                f"where nothing would add its gradients up; shard over {tuple(divided)} together, as "
                f"mesh[{tuple(divided)}]"
            )


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


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module. Does not load FSDP, which takes long."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Sharded:
    """The parts of one stage that `fully_shard` was applied to, controlled by a schedule.

    `unshard` starts to gather parameters, `wait` waits for them, and `reshard` frees them. Gradients stay whole until
    the stage's last backward, which runs within `reducing`, however often the parameters are freed in between. All of
    this uses FSDP's public API, as its documentation requires with microbatches.
    """

    def __init__(self, frame: nn.Module) -> None:
        self.frame = frame
        self._parts: list[Any] = [module for module in frame.modules() if is_sharded(module)]
        self._arriving: list[Any] = []
        self._undistributed = {id(p) for p in frame.parameters() if not is_distributed(p)}
        self._widened = False
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
        self._reduce(False)

    def unshard(self) -> None:
        """Start to gather the parameters."""
        handles = [part.unshard(async_op=True) for part in self._parts]
        self._arriving = [handle for handle in handles if handle is not None]

    def wait(self) -> None:
        """Wait until the parameters are there, before the first computation that uses them."""
        for handle in self._arriving:
            handle.wait()
        self._arriving.clear()
        if not self._widened:
            self._widen()
            self._widened = True

    def _widen(self) -> None:
        """Let gradients accumulate in the dtype in which they are reduced, if that is wider than the parameters' own.

        FSDP converts them after each backward. But what several Ws add in between would be summed in the narrow dtype.
        """
        dtypes = {p: reduction_dtype(part) for part in self._parts for p in part.parameters()}  # inner parts come last
        for parameter, dtype in dtypes.items():
            narrow = dtype is not None and gradient_dtype(parameter).itemsize < dtype.itemsize
            if narrow and parameter.is_floating_point() and id(parameter) not in self._undistributed:
                parameter.grad_dtype = dtype

    def reshard(self) -> None:
        """Free the gathered parameters."""
        self.wait()  # a replica with fewer microbatches may have had no use for them
        for part in self._parts:
            part.reshard()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that a forward uses: the whole ones between `wait` and `reshard`."""
        return dict(self.frame.named_parameters())

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Wrap the last backward of a stage, which sums and scatters gradients."""
        self._reduce(True)
        try:
            yield
        finally:
            self._reduce(False)

    def _reduce(self, now: bool) -> None:
        for part in self._parts:
            part.set_requires_gradient_sync(now, recurse=False)
            part.set_is_last_backward(now)
            part.set_reshard_after_backward(False, recurse=False)
