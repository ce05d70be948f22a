"""Which processes form the pipeline: one alone, all that torchrun started, or one dimension of a DeviceMesh."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ArgumentError
from penstock.runtime import rendezvous


@dataclass(frozen=True, slots=True)
class World:
    """The pipeline's ranks. `rank` is None where this process drives all of them."""

    ranks: int
    rank: int | None = None
    members: tuple[int, ...] = ()
    """Each rank's global rank in `torch.distributed`."""
    is_whole: bool = True
    """The pipeline takes all processes of the job."""

    @property
    def is_local(self) -> bool:
        """One process drives all ranks."""
        return self.rank is None


def join(ranks: int | None, mesh: DeviceMesh | None, device_type: str) -> World:
    """Finds the pipeline's processes, and initialises `torch.distributed` where torchrun started us and nobody has.

    Raises:
        ArgumentError: `ranks` is not the number of processes, or the mesh has other dimensions than the pipeline's.
    """
    if ranks is not None and ranks < 1:
        raise ArgumentError(f"ranks={ranks}: expected at least 1")
    if mesh is not None:
        return _from_mesh(ranks, mesh)
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return World(ranks or 1)
        rendezvous.start("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        atexit.register(_leave)
    size = dist.get_world_size()
    if size == 1:
        return World(ranks or 1)
    if ranks is not None and ranks != size:
        raise ArgumentError(
            f"ranks={ranks}, but {size} processes were started; leave ranks out, or start {ranks} processes"
        )
    return World(size, dist.get_rank(), tuple(range(size)))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _from_mesh(ranks: int | None, mesh: DeviceMesh) -> World:
    names = mesh.mesh_dim_names or ()
    others = {name: mesh.size(index) for index, name in enumerate(names) if name != "pp" and mesh.size(index) > 1}
    if mesh.ndim > 1 and "pp" not in names:
        raise ArgumentError(f"mesh has dimensions {names}; expected one named 'pp' for the pipeline")
    if others:
        raise ArgumentError(
            f"mesh has dimensions {others} besides 'pp'; only the pipeline's is supported: pass mesh['pp'] of a mesh "
            "whose other dimensions have size 1"
        )
    line = mesh["pp"] if mesh.ndim > 1 else mesh
    members = tuple(int(rank) for rank in line.mesh.flatten().tolist())
    if ranks is not None and ranks != len(members):
        raise ArgumentError(f"ranks={ranks}, but the mesh has {len(members)} ranks in its pipeline dimension")
    if len(members) == 1:
        return World(1)
    if dist.get_rank() not in members:
        raise ArgumentError(f"global rank {dist.get_rank()} is not in the mesh {members}")
    return World(len(members), members.index(dist.get_rank()), members, len(members) == dist.get_world_size())


def backend_of(device: torch.device) -> str:
    """The backend that moves tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def exchange(group: dist.ProcessGroup) -> Callable[[Any], Any]:
    """A function that gives rank 0's object to every rank of the group; each of them calls it."""

    def give(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    return give


def device_of(
    devices: Sequence[torch.device | str] | torch.device | str | None,
    world: World,
    rank: int,
    current: torch.device,
) -> torch.device:
    """Where a rank computes.

    Args:
        devices: one device, a type such as "cuda" (a rank takes its own), or one for each rank; None: where the model
            is.
        current: where the model is.

    Raises:
        ArgumentError: the number of devices is not that of the ranks.
    """
    if devices is not None and not isinstance(devices, (str, torch.device)):
        if len(devices) != world.ranks:
            raise ArgumentError(f"devices has {len(devices)} entries; expected one for each of {world.ranks} ranks")
        return torch.device(devices[rank])
    device = current if devices is None else torch.device(devices)
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"devices={devices!r}: CUDA is not available here; give 'cpu', or leave devices out")
    if device.type != "cuda" or (devices is not None and device.index is not None):
        return device
    if world.is_local:
        return device if devices is None else torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
