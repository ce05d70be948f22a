"""Stages that torch's `fully_shard` was applied to. FSDP is slow to import, and so is loaded by nothing here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock._base.compat import reduction_dtype
from penstock._base.errors import ArgumentError
from penstock._base.gradients import gradient_dtype
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.dtensors import is_distributed, mesh_dimensions


def parallelized_by(root: nn.Module, *packages: str) -> str:
    """Return the first module that torch's `fully_shard` or `replicate` gave a class of these packages; empty if there
    is none. Import no FSDP, which is slow."""
    for name, module in root.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(packages):
                return f"module {name!r}, now {type(module).__name__}" if name else type(module).__name__
    return ""


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


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module. Does not load FSDP, which takes long."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class ShardedStage:
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
