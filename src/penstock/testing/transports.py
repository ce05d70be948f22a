"""Checks that a transport conforms, by running the scripts of `transport_scripts.py`.

A process runs the steps of the ranks that it drives: both in one process, or one in each of two. Transports without
collectives skip the scripts that need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from multiprocessing.pool import ThreadPool
from threading import Barrier
from typing import Any, cast

import torch

from penstock.runtime.transport.protocol import (
    COLLECTIVES,
    POINT_TO_POINT,
    Endpoint,
    PointToPoint,
    Transport,
    TransportFactory,
    missing_methods,
)
from penstock.testing.transport_scripts import CPU, Rank, scripts_for

WAIT_SECONDS = 60.0
"""How long `check_factory` waits for the scripts to end, and how long one rank waits for the other."""


def check_transport(transports: Mapping[int, PointToPoint], device: torch.device | None = None) -> list[str]:
    """Run every script on those of ranks 0 and 1 whose transports are given, then close these. Both must call it.

    Args:
        transports: by rank.
        device: where their tensors are; None: on the CPU.

    Returns the names of the scripts it ran: those for collectives only if the transports have them, those for a step
    that raised only if both transports are given (see `PointToPoint.drop_step`). Raises AssertionError if a transport
    does not conform.
    """
    return _run(transports, CPU if device is None else device, lambda name: None)


def _run(transports: Mapping[int, PointToPoint], device: torch.device, on_start: Callable[[str], None]) -> list[str]:
    """Run the scripts, and call `on_start` with the name of each."""
    for rank, transport in transports.items():
        lacking = missing_methods(transport, POINT_TO_POINT)
        assert not lacking, f"rank {rank}'s transport is a {type(transport).__name__}, which lacks {', '.join(lacking)}"
    names = []
    has_collectives = not any(missing_methods(transport, COLLECTIVES) for transport in transports.values())
    for number, script in enumerate(scripts_for(collectives=has_collectives, one_process=len(transports) > 1)):
        on_start(script.__name__)
        ranks = {rank: Rank(cast(Transport, transport), number, device) for rank, transport in transports.items()}
        try:
            for rank, step in script():
                if rank in ranks:
                    step(ranks[rank])
        except BaseException as error:
            if isinstance(error, AssertionError):
                error.args = (f"{script.__name__}: {error}",)
            error.add_note(f"penstock: in the script {script.__name__}")
            raise
        names.append(script.__name__)
    return names


def check_factory(factory: TransportFactory) -> list[str]:
    """Run every script on the transports that a factory makes for two ranks on the CPU, each a thread of this process.

    Returns the names of the scripts. Raises AssertionError if a transport does not conform, or hangs.
    """
    gathered: list[Any] = [None, None]
    running = ["the making of its transport"] * 2
    barrier = Barrier(2)

    def check(rank: int) -> list[str]:
        def gather(value: Any) -> list[Any]:
            gathered[rank] = value
            barrier.wait(WAIT_SECONDS)
            values = list(gathered)
            barrier.wait(WAIT_SECONDS)
            return values

        try:
            transport = factory(Endpoint(rank, (0, 1), CPU, gather))
        except BaseException:
            barrier.abort()
            raise
        return _run({rank: transport}, CPU, lambda name: running.__setitem__(rank, name))

    deadline = time.monotonic() + WAIT_SECONDS
    with ThreadPool(2) as threads:
        results = [threads.apply_async(check, (rank,)) for rank in (0, 1)]
        while not all(result.ready() for result in results):
            for result in results:
                result.wait(0.05)
                if time.monotonic() > deadline:
                    hanging = ", ".join(
                        f"rank {rank} in {name}" for rank, name in enumerate(running) if not results[rank].ready()
                    )
                    raise AssertionError(
                        f"the scripts have not ended after {WAIT_SECONDS:g} s ({hanging}): a message that was sent has "
                        "not arrived"
                    )
                if result.ready():
                    result.get()  # raise its error now: the other rank may wait forever
        return results[0].get()
