"""Chooses the transport for this process's ranks: one of Penstock's, or the user's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch

from penstock._base.errors import ArgumentError
from penstock._base.process import Process
from penstock._base.words import named
from penstock.distributed.groups import Groups
from penstock.distributed.world import is_accelerator
from penstock.runtime.execute.control import Control
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.protocol import (
    COLLECTIVES,
    POINT_TO_POINT,
    Endpoint,
    Paired,
    PointToPoint,
    Transport,
    TransportFactory,
    missing,
)
from penstock.runtime.transport.shared_memory import Neighbors, SharedMemoryTransport
from penstock.runtime.transport.staging import HOST, StagedTransport

TransportName = Literal["auto", "distributed", "staged"]
TransportChoice = TransportName | TransportFactory
"""What carries values between processes: "auto" uses shared memory between CPU ranks of one machine, "distributed"
uses `torch.distributed`; "staged" is "auto" by way of the host's memory; a factory makes the user's own transport."""


def transport_of(
    choice: TransportChoice, rank: int, device: torch.device, control: Control, groups: Groups
) -> Transport:
    """Return this rank's side of the transport that all ranks chose. Every rank calls it.

    Raises:
        ArgumentError: they did not choose the same one, their factory made something else, or two of them compute on
            one accelerator without `staged`.
        Exception: whatever the factory raised.
    """
    staging = control.staging
    on_host = device.type == "cpu" or staging is not None
    possible = choice in ("auto", "staged") and on_host and Neighbors.supported()
    said: list[tuple[str, bool, str]] = control.gather(
        (_name_of(choice), possible, accelerator_of(device)), "its transport"
    )
    with control.agreed():
        _check_same([name for name, _, _ in said], control.world.number)
        if not (callable(choice) or choice == "staged"):
            check_apart([where for _, _, where in said])
            check_queues(len(groups.members) if device.type == "cuda" and staging is None else 1)
    plain = DistributedTransport(rank, groups, device if staging is None else HOST, pinned=staging is not None)
    neighbors = None
    if all(said[number][1] for number in control.world.numbers):
        with control.waiting_for("a connection", control.line):
            neighbors = Neighbors(rank, control.gather_line)
    found: Transport = SharedMemoryTransport(plain, neighbors) if neighbors and neighbors.ranks else plain
    found = found if staging is None else StagedTransport(found, staging)
    if callable(choice):
        made = _made(choice, rank, device, control)
        return Paired(rank, plain.ranks, made, found if missing(made, COLLECTIVES) else cast(Transport, made))
    return found


STAGES_NOTHING = (
    "transport: 'staged' carries values from accelerators through the host's memory; here it does what 'auto' does, "
    "since nothing travels from an accelerator to another process"
)


def staged_note(choice: TransportChoice, device: torch.device) -> str:
    """Return the note for users on a staged transport."""
    why = "since transport='staged' was given"
    if choice != "staged":
        why = (
            f"since torch.distributed was initialized without NCCL for {device.type!r}; with "
            "init_process_group('cpu:gloo,cuda:nccl'), GPUs exchange them directly"
        )
    what = "sums travel" if callable(choice) else "values and sums travel"
    return f"transport: staged: {what} from {device} through the host's memory, {why}"


def _name_of(choice: TransportChoice) -> str:
    """Return a name that all ranks can compare; for a factory, the name of its code."""
    if isinstance(choice, str):
        return repr(choice)
    function = named(choice)
    return f"{function.__module__}.{function.__qualname__}"


def _check_same(names: Sequence[str], here: int) -> None:
    """Raise ArgumentError if one rank has a factory and another something else."""
    own = names[here]
    other = next((rank for rank, name in enumerate(names) if name != own), None)
    if other is None or {own, names[other]} <= {repr(name) for name in get_args(TransportName)}:
        return
    raise ArgumentError(
        f"transport: rank {here} has {own}, and rank {other} {names[other]}; every rank must pass the same"
    )


def accelerator_of(device: torch.device) -> str:
    """Return what tells an accelerator from all others, even if each process sees only its own, as number 0; "" for a
    CPU."""
    if not is_accelerator(device):
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return f"{device} of {Process.here().machine}" if uuid is None else str(uuid)


def check_apart(accelerators: Sequence[str]) -> None:
    """Raise ArgumentError if two ranks compute on one accelerator, unless NCCL is told to allow it."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    sharing = {where: [r for r, other in enumerate(accelerators) if other == where] for where in accelerators if where}
    ranks = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    if ranks is not None:
        raise ArgumentError(
            f"devices: ranks {ranks} would compute on the same accelerator ({len(accelerators)} ranks have "
            f"{len(sharing)} in all), and NCCL exchanges nothing within one. Start no more ranks on a machine than it "
            "has accelerators, and give each its own in devices=; or pass transport='staged', which takes the way "
            "through the host's memory; or run the script without torchrun, so that one process drives all ranks"
        )


def check_queues(ranks: int) -> None:
    """Raise ArgumentError if messages share queues with computation (Megatron-LM: CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    given, needed = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), 1 + 2 * min(ranks - 1, 2)
    if given.isdecimal() and int(given) < needed:
        raise ArgumentError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={given}: in so few queues, computation waits behind messages that wait for "
            f"others, and ranks may hang; expected at least {needed}: unset the variable, or pass transport='staged'"
        )


def _made(factory: TransportFactory, rank: int, device: torch.device, control: Control) -> PointToPoint:
    """Return the transport that a factory makes for this rank; close it if another rank's is refused."""
    world = control.world

    def gather(value: Any) -> list[Any]:
        everyone = control.gather(value, "its transport")
        return [everyone[number] for number in world.numbers]

    made: PointToPoint | None = None
    try:
        with control.working("the making of its transport"):
            # It may wait for other ranks, so any error it raises ends the run immediately.
            made = factory(Endpoint(rank, world.members, device, gather))
        with control.agreed():
            _check_made(made, _name_of(factory))
    except BaseException:
        with contextlib.suppress(Exception):
            if made is not None:
                made.close()
        raise
    return made


def _check_made(made: object, name: str) -> None:
    lacking = missing(made, POINT_TO_POINT)
    some = [method for method in COLLECTIVES if method not in missing(made, COLLECTIVES)]
    if not lacking and some not in (list(COLLECTIVES), ["close"]):
        lacking = missing(made, COLLECTIVES)
    if lacking:
        what = "nothing (None)" if made is None else f"an object of {type(made).__name__}"
        raise ArgumentError(
            f"transport={name} made {what}, which lacks {', '.join(lacking)}; expected an object with the "
            f"methods of penstock.runtime.transport.PointToPoint ({', '.join(POINT_TO_POINT)}) and, if it is to do the "
            "collectives as well, reduce and broadcast: have the factory return one"
        )
