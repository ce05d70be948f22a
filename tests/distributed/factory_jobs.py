"""What ranks of a pool run with a transport of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jobs

import penstock
from penstock.runtime.transport import Endpoint, PointToPoint
from scaffolding.tcp import sockets

CLOSED: list[int] = []
"""The ranks whose transport was closed."""


class Half:
    """Messages, and one of the two collectives."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._rank = endpoint.rank

    def connect(self, *_: Any) -> None: ...

    channel = release = end_step = drop_step = broadcast = connect

    def close(self) -> None:
        CLOSED.append(self._rank)


def only_on(rank: int, endpoint: Endpoint) -> Any:
    """Sockets on one rank, and nothing on others."""
    made = sockets(endpoint)
    return made if endpoint.rank == rank else None


def raises_on(rank: int, kind: type[Exception], endpoint: Endpoint) -> PointToPoint:
    """A rank fails by itself while the others wait for it."""
    if endpoint.rank == rank:
        raise kind("no such network")
    endpoint.gather(None)
    return sockets(endpoint)


def refused(rank: int) -> dict[str, str]:
    """What each wrong factory is told, and what the sockets give afterwards."""
    task = jobs.mlp()
    said = {}

    def attempt(name: str, transport: Any) -> None:
        try:
            penstock.pipeline(task.model, task.args, loss_fn=task.loss, transport=transport)
        except penstock.PenstockError as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("another", sockets if rank == 0 else "auto")
    attempt("other factories", sockets if rank == 0 else partial(only_on, 0))
    attempt("half", Half)
    said["closed"] = str(CLOSED)
    attempt("nothing on rank 1", partial(only_on, 0))
    said["then"] = jobs.verify(rank, "mlp", {"microbatches": 3, "transport": sockets})[1]
    return said


def fail(rank: int, kind: type[Exception]) -> None:
    task = jobs.mlp()
    penstock.pipeline(task.model, task.args, loss_fn=task.loss, transport=partial(raises_on, 1, kind))
