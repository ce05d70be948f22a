"""What ranks run where all groups but Penstock's own for control take a device's tensors only, as NCCL's do.

The device is the stand-in. gloo, which cannot send its tensors, gets their values on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from penstock.distributed.groups import Groups
from scaffolding import stand_in
from scaffolding.stand_in import DEVICE, StandIn

MOVING = ("isend", "irecv", "broadcast", "all_reduce", "send", "recv")
OBJECTS = ("broadcast_object_list", "all_gather_object")


@contextmanager
def device_groups() -> Iterator[list[str]]:
    """Imposes it; the names of the calls that moved a device's tensor are returned."""
    control: list[dist.ProcessGroup] = []
    moved: list[str] = []
    one_of = Groups._create_own

    def noting(groups: Groups, parts: Any, backend: str) -> dist.ProcessGroup:
        made = one_of(groups, parts, backend)
        if backend == "gloo":
            control.append(made)
        return made

    def strict(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def checked(tensor: Any, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
            if any(group is one for one in control):
                return call(tensor, *args, group=group, **kwargs)
            if not isinstance(tensor, StandIn):
                where = getattr(tensor, "device", "cpu")  # objects travel as tensors on the CPU
                raise RuntimeError(f"{name}: no backend for a tensor on {where} in a group for {DEVICE}")
            moved.append(name)
            return call(tensor.values, *args, group=group, **kwargs)

        return checked

    with (
        mock.patch.object(Groups, "_create_own", noting),
        mock.patch("penstock.runtime.execute.control.backend_for") as of,
    ):
        of.return_value = "cpu:gloo"  # another name for it
        with mock.patch.multiple(dist, **{name: strict(name) for name in (*MOVING, *OBJECTS)}):
            yield moved


def own_device(rank: int) -> None:
    """Gives each rank a stand-in device of its own."""
    stand_in.install()
    module: Any = torch.get_device_module(DEVICE)
    module.get_device_properties = lambda device: SimpleNamespace(uuid=f"accelerator {rank}")
