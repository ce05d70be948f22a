"""Determines which processes take part: a single one, all that torchrun started, or a DeviceMesh's, in which a pipeline
is one line.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.formatting import pluralize
from penstock.distributed.joining import start

PIPELINE = "pp"
DATA = ("dp", "dp_replicate", "dp_shard", "fsdp")
"""Dimensions of a mesh along which the batch is divided."""
TENSOR = "tp"
_UNSUPPORTED = {
    "cp": "context parallelism divides the sequence, along which a loss and its weight would have to be added up",
    "ep": "expert parallelism trains with other data on ranks that share all other parameters",
}


@dataclass(frozen=True, slots=True)
class World:
    """The pipeline's ranks. `rank` is None if this process drives all of them.

    Attributes:
        ranks: how many ranks a pipeline has.
        rank: this process's rank, 0..ranks-1.
        members: each rank's global rank in `torch.distributed`.
        everyone: the global ranks of the whole mesh, of which `members` is one line; by default only that line.
        replicas: the global ranks that hold the same as this one and train on other data, in order; includes this one.
        column: the global ranks that run the same stages, on other data or with a share of each layer.
        lines, replica_sets, columns: the same for all processes; each divides `everyone` into disjoint parts.
        divided: the mesh dimensions along which the batch is divided.
        replica: this process's number among `replicas`.
        tp_rank: this process's number among those that share a replica's layers (tensor parallelism).
    """

    ranks: int
    rank: int | None = None
    members: tuple[int, ...] = ()
    everyone: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    column: tuple[int, ...] = ()
    divided: tuple[str, ...] = ()
    replica: int = 0
    tp_rank: int = 0
    lines: tuple[tuple[int, ...], ...] = ()
    replica_sets: tuple[tuple[int, ...], ...] = ()
    columns: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.rank is not None:
            me = (self.members[self.rank],)
            defaults = {"everyone": self.members, "replicas": me, "column": me, "lines": (self.members,)}
            for field, value in defaults.items():
                object.__setattr__(self, field, getattr(self, field) or value)

    @property
    def is_local(self) -> bool:
        """Whether one process drives all ranks."""
        return self.rank is None

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done only once, such as making a folder."""
        return self.rank is None or self.number == 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number in the whole mesh of each of the pipeline's ranks, as messages use it."""
        return tuple(self.everyone.index(member) for member in self.members) or tuple(range(self.ranks))

    @property
    def number(self) -> int:
        """This process's number in the whole mesh."""
        return 0 if self.rank is None else self.numbers[self.rank]

    @property
    def partners(self) -> tuple[int, ...]:
        """The numbers of the other processes that run the same stages: what is sharded is gathered from them."""
        numbers = (self.everyone.index(member) for member in self.column)
        return tuple(number for number in numbers if number != self.number)

    @property
    def data_parallel(self) -> int:
        """How many replicas of the model train together, each on its own part of the batch."""
        return max(1, len(self.replicas))


def join(ranks: int | None, mesh: DeviceMesh | None, device_type: str, order: Sequence[int] = ()) -> World:
    """Find the pipeline's processes. Initializes `torch.distributed` if torchrun started us and no one else has yet.

    Args:
        order: without a mesh, which process is each rank, if there are as many; empty: in order.

    Raises:
        ArgumentError: `ranks` is not the number of processes, or the mesh's dimensions are not the pipeline's.
    """
    check_counts(required=False, ranks=ranks)
    if isinstance(mesh, DeviceMesh):
        return _from_mesh(ranks, mesh)
    if mesh is not None:
        raise ArgumentError(
            f"mesh={mesh!r}: expected a DeviceMesh, as torch.distributed.device_mesh.init_device_mesh makes, or None"
        )
    if not dist.is_initialized():
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return World(ranks or 1)
        start("cpu:gloo,cuda:nccl" if device_type == "cuda" and dist.is_nccl_available() else "gloo")
        atexit.register(_leave)
    size = dist.get_world_size()
    if size == 1:
        return World(ranks or 1)
    if ranks is not None and ranks != size:
        raise ArgumentError(
            f"ranks={ranks}, but {size} processes were started; leave ranks out, or start {ranks} processes, or for "
            "replicas pass mesh=, a DeviceMesh with dimensions 'dp' and 'pp'"
        )
    members = tuple(order) if len(order) == size else tuple(range(size))
    return World(size, members.index(dist.get_rank()), members)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _from_mesh(ranks: int | None, mesh: DeviceMesh) -> World:
    names = mesh.mesh_dim_names or (PIPELINE,)
    if PIPELINE not in names or len(names) != mesh.ndim:
        raise ArgumentError(f"mesh has dimensions {names}; expected one named {PIPELINE!r} for the pipeline")
    for name in names:
        if name not in (PIPELINE, TENSOR, *DATA) and mesh.size(names.index(name)) > 1:
            reason = _UNSUPPORTED.get(name, f"the dimensions are {PIPELINE!r}, {TENSOR!r} and, for data, {DATA}")
            raise ArgumentError(f"mesh has a dimension {name!r}, which a pipeline cannot have: {reason}")
    grid = mesh.mesh
    size = mesh.size(names.index(PIPELINE))
    if ranks not in (None, size):
        raise ArgumentError(f"ranks={ranks}, but the mesh has {size} ranks in its pipeline dimension")
    if grid.numel() == 1:
        return World(1)
    if not (grid == dist.get_rank()).any():
        raise ArgumentError(f"global rank {dist.get_rank()} is not in the mesh {grid.tolist()}")

    def parts(*free: str) -> tuple[tuple[int, ...], ...]:
        """Divide the mesh into parts whose global ranks differ only in these dimensions."""
        varying_axes = [axis for axis, name in enumerate(names) if name in free]
        fixed_axes = [axis for axis, name in enumerate(names) if name not in free]
        size = math.prod(grid.shape[axis] for axis in varying_axes)
        return tuple(map(tuple, grid.permute(*fixed_axes, *varying_axes).reshape(-1, size).tolist()))

    def along(*free: str) -> tuple[int, ...]:
        return next(part for part in parts(*free) if dist.get_rank() in part)

    for name in names:
        if any(list(part) != sorted(part) for part in parts(name)):
            raise ArgumentError(
                f"the global ranks of the mesh, {grid.tolist()}, do not ascend along {name!r}, as torch's groups want "
                "them to; make the mesh of ascending ranks"
            )
    members = along(PIPELINE)
    replicas, tensor_parallel = along(*DATA), along(TENSOR)
    me = dist.get_rank()
    return World(
        len(members),
        members.index(me),
        members,
        along(*names),
        replicas,
        along(TENSOR, *DATA),
        tuple(name for name in names if name in DATA and mesh.size(names.index(name)) > 1),
        replicas.index(me),
        tensor_parallel.index(me),
        parts(PIPELINE),
        parts(*DATA),
        parts(TENSOR, *DATA),
    )


def backend_for(device: torch.device) -> str:
    """Return the backend that moves a device's tensors: NCCL, if the default process group has it for them, or gloo.

    gloo sends no tensors from a device: those go through the host's memory (`runtime/transport/staging.py`).
    """
    return "nccl" if device.type == "cuda" and "cuda:nccl" in dist.get_backend_config().split(",") else "gloo"


def parse_device(name: str | torch.device) -> torch.device:
    """Return the device that the user names. Raise ArgumentError if torch does not know the name."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"devices: there is no device {name!r}; expected {_DEVICES}") from error


_DEVICES = "a device such as 'cpu', 'cuda' or 'cuda:0'"


def resolve_device(
    devices: Sequence[torch.device | str] | torch.device | str | None,
    world: World,
    rank: int,
    current: torch.device,
) -> torch.device:
    """Return where a rank computes. That ranks do not share an accelerator is checked once they have found each other.

    Args:
        devices: one device, a type such as "cuda" (a rank takes its own), or one per rank; None: `current`.
        current: where the model is, or the example.

    Raises:
        ArgumentError: there is no such device, or the number of devices is not the number of ranks.
    """
    if devices is not None and not isinstance(devices, (str, torch.device)):
        if not isinstance(devices, Sequence):
            raise ArgumentError(f"devices={devices!r}: expected {_DEVICES}, or a list with one for each rank")
        if len(devices) != world.ranks:
            entries = pluralize(len(devices), "entry")
            raise ArgumentError(f"devices has {entries}; expected one for each of {world.ranks} ranks")
        return parse_device(devices[rank])
    device = current if devices is None else parse_device(devices)
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu":
        return device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"devices={devices!r}: CUDA is not available here; pass 'cpu', or leave devices out")
    if devices is not None and device.index is not None:
        return device
    if world.is_local and devices is None:
        return device
    count = torch.get_device_module(device).device_count()
    return torch.device(device.type, (rank if world.is_local else int(os.environ.get("LOCAL_RANK", rank))) % count)


def check_same_backend(rank_backends: Sequence[tuple[str, str]]) -> None:
    """Raise ArgumentError if ranks, by the type of their device and its backend, compute on devices of different types,
    for which their recordings would differ, or would exchange tensors over different backends."""
    device_type, backend = rank_backends[0]
    for rank, (other_type, other_backend) in enumerate(rank_backends):
        if other_type != device_type:
            raise ArgumentError(
                f"devices: rank 0 computes on {device_type!r}, and rank {rank} on {other_type!r}. Without devices= a "
                "rank computes where its model is, or where its example is if that is on an accelerator; pass the same "
                "devices= on every rank"
            )
        if other_backend != backend:
            raise ArgumentError(
                f"transport: rank 0 exchanges tensors over {backend}, and rank {rank} over {other_backend}; pass the "
                "same transport= on every rank"
            )
