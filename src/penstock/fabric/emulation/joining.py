"""How hosts find each other, and find out who is missing."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.errors import ArgumentError, FabricError
from penstock.fabric.emulation.spec import Spec

_Store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, though not re-exported
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

_ANSWER_SECONDS = 3.0
"""What the others get to say that they are still there, when one of them was lost."""


class Started(NamedTuple):
    """What torchrun tells a process: its number, how many there are, and where they meet."""

    rank: int
    size: int
    address: str
    port: int


def started() -> Started:
    """What torchrun says in the environment. Raises ArgumentError if torchrun has not set it."""

    def text(name: str) -> str:
        if name not in os.environ:
            raise ArgumentError(
                f"the environment has no {name}: start every host with torchrun, or give --hosts to make them here"
            )
        return os.environ[name]

    def number(name: str) -> int:
        if not text(name).isdecimal():
            raise ArgumentError(f"{name} is {text(name)!r} in the environment, but torchrun sets it to a number")
        return int(text(name))

    return Started(number("RANK"), number("WORLD_SIZE"), text("MASTER_ADDR"), number("MASTER_PORT"))


@dataclass(frozen=True, slots=True)
class Members:
    """The hosts of a run, as this one sees them.

    Attributes:
        rank, size: this host's number, and how many there are.
        store: what they share besides the network under test.
        control: a gloo group of all, for what is not part of a trial; None: the default group is one.
    """

    rank: int
    size: int
    store: Any
    control: dist.ProcessGroup | None

    def first_error(self, said: str) -> str:
        """Called by every host that met an error: what the first of them said."""
        try:
            return bytes(self.store.compare_set("error", "", said)).decode()
        except (RuntimeError, OSError):  # the store was on a lost host
            return said

    def who_is_lost(self) -> tuple[int, ...]:
        """Called by every host that met an error: those that do not say so within a few seconds."""
        try:
            self.store.set(f"still/{self.rank}", "here")
            return self._without("still", _ANSWER_SECONDS)
        except (RuntimeError, OSError):  # the store was on the lost host
            return (0,) if self.rank else ()

    def _without(self, key: str, seconds: float) -> tuple[int, ...]:
        return without(self.store, key, self.size, seconds)


def without(store: Any, key: str, size: int, seconds: float) -> tuple[int, ...]:
    """The ranks that have not set `key/rank` after this many seconds."""
    deadline = time.monotonic() + seconds
    left = list(range(size))
    while True:
        left = [rank for rank in left if not store.check([f"{key}/{rank}"])]
        if not left or time.monotonic() > deadline:
            return tuple(left)
        time.sleep(0.05)


@contextmanager
def joined(spec: Spec) -> Iterator[Members]:
    """Joins the other hosts, by the environment that torchrun sets, and leaves them at the end.

    Raises:
        ArgumentError: the environment is not torchrun's, or another number of hosts was started.
        FabricError: a host does not join in time.
    """
    rank, size, address, port = started()
    if size != spec.hosts:
        raise ArgumentError(f"{size} processes were started for {spec.hosts} hosts: start as many, or change --hosts")
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=spec.join_seconds)
    try:
        store = _Store(address, port, None, rank == 0 and not agents, limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise FabricError(
            f"host {rank} does not reach host 0 at {address}:{port} within {spec.join_seconds:g} s: {first_line(error)}"
        ) from None
    try:
        store.set(f"here/{rank}", socket.gethostname())
        missing = without(store, "here", size, spec.join_seconds)
    except (RuntimeError, OSError) as error:  # it is at host 0
        raise FabricError(f"host 0 left while the hosts were joining, says host {rank}: {first_line(error)}") from None
    if missing:
        raise FabricError(
            f"{hosts_text(missing)} did not join within {spec.join_seconds:g} s: "
            f"{size - len(missing)} of {size} are here. Start the others with the same address, {address}:{port}"
        )
    try:
        dist.init_process_group(
            spec.backend,
            store=_PrefixStore("fabric", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=spec.stall_seconds),
        )
        control = None if spec.backend == "gloo" else dist.new_group(backend="gloo")
    except (RuntimeError, OSError) as error:
        raise FabricError(
            f"host {rank}: all hosts are here, but {spec.backend} cannot connect them: {first_line(error)}. Does "
            "GLOO_SOCKET_IFNAME name the interface that they reach each other by?"
        ) from None
    try:
        yield Members(rank, size, store, control)
    finally:
        dist.destroy_process_group()


def hosts_text(ranks: tuple[int, ...]) -> str:
    """host 2; hosts 1, 2 and 3."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"host {names[0]}"
    return f"hosts {', '.join(names[:-1])} and {names[-1]}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line; of gloo's, without its place in the source and its good wishes."""
    said = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^]]*\.(cc|h|cpp|hpp):\d+\] ", "", said).partition(". This is typically caused by")[0]
