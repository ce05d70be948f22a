"""Chooses the transport for this process's ranks: one of Penstock's, or the user's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from penstock._base.compat import is_accelerator
from penstock._base.errors import ArgumentError
from penstock._base.formatting import named
from penstock._base.process import Process
from penstock.distributed.groups import Groups
from penstock.runtime.execute.control import Control
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.neighbors import Neighbors
from penstock.runtime.transport.protocol import (
    COLLECTIVES,
    POINT_TO_POINT,
    Combined,
    Endpoint,
    PointToPoint,
    Transport,
    TransportFactory,
    missing_methods,
)
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.runtime.transport.staging import HOST, StagedTransport

TransportName = Literal["auto", "distributed", "staged"]
TransportChoice = TransportName | TransportFactory
"""What carries values between processes: a name in `TRANSPORTS`, or a factory of the user's own transport."""


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """What a transport's name stands for.

    Attributes:
        shares_memory: use shared memory between CPU ranks of one machine, and `torch.distributed` otherwise.
        staged: carry values from accelerators by way of the host's memory.
        factory: makes the transport, as a user's factory does; None: one of the above.
    """

    shares_memory: bool = False
    staged: bool = False
    factory: TransportFactory | None = None


TRANSPORTS: dict[TransportName, TransportSpec] = {
    "auto": TransportSpec(shares_memory=True),
    "distributed": TransportSpec(),
    "staged": TransportSpec(shares_memory=True, staged=True),
}


def find_transport(choice: TransportChoice) -> TransportSpec:
    """Return what a name or a user's factory stands for."""
    return TransportSpec(factory=choice) if callable(choice) else TRANSPORTS[choice]


def make_transport(
    choice: TransportChoice, rank: int, device: torch.device, control: Control, groups: Groups
) -> Transport:
    """Return this rank's side of the transport that all ranks chose. Every rank calls it.

    Raises:
        ArgumentError: they did not choose the same one, their factory made something else, or two of them compute on
            one accelerator without `staged`.
        Exception: whatever the factory raised.
    """
    spec = find_transport(choice)
    staging = control.staging
    on_host = device.type == "cpu" or staging is not None
    can_share = spec.shares_memory and on_host and Neighbors.supported()
    gathered: list[tuple[str, bool, str]] = control.gather(
        (_choice_name(choice), can_share, accelerator_id(device)), "its transport"
    )
    with control.agreed():
        _check_same([name for name, _, _ in gathered], control.world.number)
        if spec.factory is None and not spec.staged:
            check_distinct_accelerators([accelerator for _, _, accelerator in gathered])
            check_queues(len(groups.members) if device.type == "cuda" and staging is None else 1)
    carried, pinned = device if staging is None else HOST, staging is not None
    transport: Transport = DistributedTransport(rank, groups, carried, pinned=pinned)
    if all(gathered[number][1] for number in control.world.numbers):
        with control.waiting_for("a connection", control.pipeline_peers):
            neighbors = Neighbors(rank, control.gather_pipeline)
        if neighbors.ranks:
            transport = SharedMemoryTransport(rank, groups, carried, neighbors, pinned=pinned)
    transport = transport if staging is None else StagedTransport(transport, staging)
    if spec.factory is not None:
        custom = _make_custom(spec.factory, rank, device, control)
        return Combined(
            rank,
            transport.ranks,
            custom,
            transport if missing_methods(custom, COLLECTIVES) else cast(Transport, custom),
        )
    return transport


NOTHING_STAGED = (
    "transport: 'staged' carries values from accelerators through the host's memory; here it does what 'auto' does, "
    "since nothing travels from an accelerator to another process"
)


def staged_note(choice: TransportChoice, device: torch.device) -> str:
    """Return the note for users on a staged transport."""
    reason = "since transport='staged' was given"
    spec = find_transport(choice)
    if not spec.staged:
        reason = (
            f"since torch.distributed was initialized without NCCL for {device.type!r}; with "
            "init_process_group('cpu:gloo,cuda:nccl'), GPUs exchange them directly"
        )
    payload = "sums travel" if spec.factory else "values and sums travel"
    return f"transport: staged: {payload} from {device} through the host's memory, {reason}"


def _choice_name(choice: TransportChoice) -> str:
    """Return a name that all ranks can compare; for a factory, the name of its code."""
    if isinstance(choice, str):
        return repr(choice)
    function = named(choice)
    return f"{function.__module__}.{function.__qualname__}"


def _check_same(names: Sequence[str], number: int) -> None:
    """Raise ArgumentError if one rank has a factory and another something else."""
    own_name = names[number]
    other = next((rank for rank, name in enumerate(names) if name != own_name), None)
    own_kinds = {repr(name) for name, spec in TRANSPORTS.items() if spec.factory is None}
    if other is None or {own_name, names[other]} <= own_kinds:
        return
    raise ArgumentError(
        f"transport: rank {number} has {own_name}, and rank {other} {names[other]}; every rank must pass the same"
    )


def accelerator_id(device: torch.device) -> str:
    """Return an id that is unique among accelerators, even if each process sees only its own, as number 0; "" for a
    CPU."""
    if not is_accelerator(device):
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return f"{device} of {Process.here().machine}" if uuid is None else str(uuid)


def check_distinct_accelerators(accelerators: Sequence[str]) -> None:
    """Raise ArgumentError if two ranks compute on one accelerator, unless NCCL_MULTI_RANK_GPU_ENABLE allows it."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    sharing = {name: [r for r, n in enumerate(accelerators) if n == name] for name in accelerators if name}
    ranks = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    if ranks is not None:
        raise ArgumentError(
            f"devices: ranks {ranks} would compute on the same accelerator ({len(accelerators)} ranks have "
            f"{len(sharing)} in all), and NCCL exchanges nothing within one. Start no more ranks on a machine than "
            "it has accelerators, and give each its own in devices=; or pass transport='staged', which takes the way "
            "through the host's memory; or run the script without torchrun, so that one process drives all ranks"
        )


def check_queues(ranks: int) -> None:
    """Raise ArgumentError if messages share queues with computation (Megatron-LM: CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    value, required = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), 1 + 2 * min(ranks - 1, 2)
    if value.isdecimal() and int(value) < required:
        raise ArgumentError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={value}: in so few queues, computation waits behind messages that wait for "
            f"others, and ranks may hang; expected at least {required}: unset the variable, or pass transport='staged'"
        )


def _make_custom(factory: TransportFactory, rank: int, device: torch.device, control: Control) -> PointToPoint:
    """Return the transport that a factory makes for this rank; close it if another rank's is refused."""
    world = control.world

    def gather(value: Any) -> list[Any]:
        everyone = control.gather(value, "its transport")
        return [everyone[number] for number in world.numbers]

    transport: PointToPoint | None = None
    try:
        with control.working("the making of its transport"):
            # It may wait for other ranks, so any error it raises ends the run immediately.
            transport = factory(Endpoint(rank, world.members, device, gather))
        with control.agreed():
            _check_custom(transport, _choice_name(factory))
    except BaseException:
        with contextlib.suppress(Exception):
            if transport is not None:
                transport.close()
        raise
    return transport


def _check_custom(transport: object, name: str) -> None:
    lacking = missing_methods(transport, POINT_TO_POINT)
    present = [method for method in COLLECTIVES if method not in missing_methods(transport, COLLECTIVES)]
    if not lacking and present not in (list(COLLECTIVES), ["close"]):
        lacking = missing_methods(transport, COLLECTIVES)
    if lacking:
        description = "nothing (None)" if transport is None else f"an object of {type(transport).__name__}"
        raise ArgumentError(
            f"transport={name} made {description}, which lacks {', '.join(lacking)}; expected an object with the "
            f"methods of penstock.runtime.transport.PointToPoint ({', '.join(POINT_TO_POINT)}) and, if it is to do the "
            "collectives as well, reduce and broadcast: have the factory return one"
        )
