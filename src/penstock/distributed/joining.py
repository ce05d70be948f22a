"""How ranks find each other before the watchdog starts, and what they print while one is missing.

Ranks meet at torch's store, which only shows which have arrived. The failure detector takes over once rank 0 has.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock._base.errors import ArgumentError, RankFailedError
from penstock._base.formatting import printable_line
from penstock._base.process import Process, environments
from penstock.distributed.failure import name_ranks, notify
from penstock.distributed.failure_detector import Timeouts

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.5
_SEARCH_SECONDS = 5.0
_MAX_NAMED = 8
_MAX_CHARACTERS = 200
_URL = "env://?world_size=-1"
"""The store of the environment's variables; it does not wait for all ranks: those that arrive report who is missing."""
_REMEDY = "start all ranks with torchrun or penstock run, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"


class Store(Protocol):
    """What `Meeting` needs of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


def read_number(name: str, low: int, high: int = 1 << 31, remedy: str = _REMEDY) -> int:
    """Read a number of the environment that torchrun sets. Raise ArgumentError if it is missing or impossible."""
    text = os.environ.get(name, "")[:80]
    if not (text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        sizes = f"WORLD_SIZE={os.environ.get('WORLD_SIZE', '')[:80]!r}"
        raise ArgumentError(
            f"{name}={text!r} in the environment, with {sizes}: expected an integer from {low} to {high}; {remedy}"
        )
    return int(text)


def start(
    backend: str, timeouts: Timeouts | None = None, caller: str = "penstock.pipeline", seconds: float | None = None
) -> Any:
    """Join the processes that torchrun started: call `init_process_group`, with nothing left from an earlier attempt.

    Args:
        timeouts: how long to wait for the other ranks.
        caller: what each rank has to call, for messages.
        seconds: how long an operation of the default group may take; None: torch's own limit.

    Returns the store at which the ranks met.
    """
    timeouts = timeouts or Timeouts()
    ranks = read_number("WORLD_SIZE", 1)
    rank = read_number("RANK", 0, ranks - 1)
    with MissingRanks(rank, ranks, timeouts, caller) as missing:
        missing.address = os.environ.get("MASTER_ADDR", ""), read_number("MASTER_PORT", 1, 65535)
        limit = timedelta(seconds=timeouts.join_seconds)
        store, *_ = next(rendezvous(_URL, timeout=limit))  # without torchrun, rank 0 opens it
        missing.reached = True
        store = dist.PrefixStore(attempt() or "default_pg", store)  # type: ignore[attr-defined]  # public, though not re-exported
        Meeting(store, rank, ranks).await_all(missing)  # torch may wait for them silently
        missing.ranks = ()
        timeout = None if seconds is None else timedelta(seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return store


def attempt() -> str:
    """Return a name for this attempt of a job that torchrun restarted; none in the first attempt.

    torchrun (since 2.4) gives one store to all attempts of a job. Processes of the next attempt would read what earlier
    ones wrote there: the addresses at which gloo listened, or where rank 0 was.

    Several agents (nodes) count attempts differently, so only torchrun could tell the attempts apart: in that case
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes each attempt create its own store.
    """
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_single_agent = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return f"attempt {number}" if number and is_single_agent else ""


def meeting_store(store: Any, ranks: Sequence[int]) -> Store:
    """Return where the processes of a mesh meet: in the job's store, under a name of their own, and of this attempt.

    The default group may be the user's, whose store is then not separated by attempt.
    """
    name = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    parts = filter(None, ("penstock", name, attempt()))
    prefixed: Store = dist.PrefixStore(" ".join(parts), store)  # type: ignore[attr-defined]  # public, though not re-exported
    return prefixed


class Launcher:
    """The process that started this one: torchrun's agent on this machine, if there is one.

    Ranks live on when their agent is killed, for lack of memory for example: nothing would restart them, report how
    they end, or end them with the job.
    """

    def __init__(self) -> None:
        self._pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def explain_exit(self) -> str | None:
        """Explain that the launcher has ended, as this process's parent shows; None while it is there, or if there is
        none."""
        if self._pid is None or os.getppid() == self._pid:
            return None
        return f"its torchrun agent (process {self._pid}) is gone"

    def ended_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of these global ranks that the agent started on this machine and that have no process left.

        Found by their environment, on Linux; none elsewhere, or where this process does not show its own.
        """
        if self._pid is None or not Path("/proc/self/environ").exists():
            return ()
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        local = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        job = {os.fsencode(f"{name}={os.environ.get(name)}") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")}
        alive = {entry for _, environment in environments() if job <= {*environment} for entry in environment}
        return tuple(rank for rank in ranks if rank in local and f"RANK={rank}".encode() not in alive) if alive else ()


class MissingRanks:
    """The ranks that have not arrived. Inside its `with` block, it prints every `warn_seconds` that this rank waits.

    A thread prints it, since the main thread may be blocked in torch: in a store whose process is stopped, for example.

    Args:
        caller: what each rank has to call.

    Attributes:
        ranks: those missing, as far as is known; empty once all have arrived and only torch may wait.
        address: where they meet, if that is known: MASTER_ADDR and MASTER_PORT.
        reached: whether this rank has reached it.
    """

    address: tuple[str, int] | None = None
    reached = False

    def __init__(self, rank: int, ranks: int, timeouts: Timeouts, caller: str = "penstock.pipeline") -> None:
        self._caller = caller
        self.ranks = tuple(range(1, ranks)) if rank == 0 else (0,)  # the others come to rank 0
        self._rank, self._timeouts, self._launcher = rank, timeouts, Launcher()
        self._began = time.monotonic()
        self._all_ranks = range(ranks)
        self._next_warning, self._next_search = self._began + timeouts.warn_seconds, self._began + _SEARCH_SECONDS
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="penstock-joining", daemon=True)

    def __enter__(self) -> MissingRanks:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join()
        if isinstance(error, dist.DistError) and self.address:
            raise RankFailedError(
                f"rank {self._rank} stops: {self._explain_error(str(error), *self.address)}"
            ) from None

    def _explain_error(self, error: str, host: str, port: int) -> str:
        """Explain what it means that torch's store failed."""
        location = f"{host}:{port} (MASTER_ADDR and MASTER_PORT)"
        if "EADDRINUSE" in error:
            return (
                f"another process listens at {location} already: an earlier job, or a second process with "
                f"RANK={self._rank}; set a free MASTER_PORT, and another RANK for each process"
            )
        if not self.reached and "timed out" in error:
            return f"it cannot reach rank 0 {_describe_address(host, port)}"
        summary = printable_line(error, _MAX_CHARACTERS)
        return f"the store at {location}, which rank 0 or its agent keeps, is gone; see why that has ended ({summary})"

    @property
    def needs_update(self) -> bool:
        """Whether `ranks` must be updated now: that takes a query per rank, so it is done only before a message."""
        end = self._began + self._timeouts.join_seconds
        return time.monotonic() + 2 * _LONGEST_LOOK_SECONDS >= min(self._next_warning, end)

    def check(self) -> None:
        """Raise RankFailedError if this rank has waited for `join_seconds`, or its launcher is gone."""
        if (reason := self._launcher.explain_exit()) is not None:
            raise RankFailedError(f"rank {self._rank} stops: {reason}")
        if time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + _SEARCH_SECONDS
            # A pipeline on part of the job counts its ranks by itself, not as torchrun does.
            is_whole_job = str(len(self._all_ranks)) == os.environ.get("WORLD_SIZE")
            if is_whole_job and (ended := self._launcher.ended_ranks(self._all_ranks)):
                raise RankFailedError(
                    f"rank {self._rank} stops: {name_ranks(ended)} {_have(ended)} ended before all ranks had called "
                    f"{self._caller}, as each has to"
                )
        if time.monotonic() - self._began >= self._timeouts.join_seconds:
            raise RankFailedError(
                f"{self._message('waited')}. Each rank has to be started, and to call {self._caller}."
            )

    def _repeat(self) -> None:
        while not self._finished.wait(self._next_warning - time.monotonic()):
            notify(self._message("has waited"))
            self._next_warning = time.monotonic() + self._timeouts.warn_seconds

    def _message(self, waited: str) -> str:
        message = f"rank {self._rank} {waited} {time.monotonic() - self._began:.0f} s"
        if not self.ranks:
            return f"{message} in init_process_group, which all ranks have entered"
        if self.address and not self.reached:
            return f"{message} for rank 0 {_describe_address(*self.address)}"
        message += f" for {name_ranks(self.ranks)}, which {_have(self.ranks)} not called {self._caller} yet"
        arrived = [rank for rank in self._all_ranks if rank not in self.ranks]
        if not (self.address and arrived):
            return message
        names = name_ranks(arrived) if len(arrived) <= _MAX_NAMED else f"the other {len(arrived)} ranks"
        return f"{message}; with WORLD_SIZE={len(self._all_ranks)} {names} came to {self.address[0]}:{self.address[1]}"


class Meeting:
    """One meeting of all ranks in a store; every rank counts the meetings in the same order.

    Args:
        store: prefixed with the name of the meeting place.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._number = store.add(f"rank {rank}", 1)
        self._duplicate_key: str | None = f"rank {rank} process {self._number - 1}" if self._number > 1 else None
        store.set(f"rank {rank} process {self._number}", json.dumps(astuple(Process.here())))

    def absent(self) -> tuple[int, ...]:
        """Return the ranks that have not arrived."""
        return tuple(rank for rank in range(self._ranks) if self._store.add(f"rank {rank}", 0) < self._number)

    def broadcast(self, value: Any, missing: MissingRanks) -> Any:
        """Return rank 0's value, a plain one, on every rank. Raise RankFailedError if rank 0 does not arrive."""
        key = f"meeting {self._number}"
        if self._rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        self._wait(lambda: self._store.check([key]), missing)
        return json.loads(self._store.get(key))

    def await_all(self, missing: MissingRanks) -> None:
        """Wait until all ranks have arrived. Raise RankFailedError if one does not, or counts the ranks differently."""
        store, arrived_key = self._store, f"come {self._number}"
        agreeing_key = f"{arrived_key} of {self._ranks}"
        store.add(agreeing_key, 1)
        store.set(f"{arrived_key} entry {store.add(arrived_key, 1)}", json.dumps([self._rank, self._ranks]))

        def all_arrived() -> bool:
            if (entries := store.add(arrived_key, 0)) > store.add(agreeing_key, 0):
                arrivals = (json.loads(store.get(f"{arrived_key} entry {entry}")) for entry in range(1, entries + 1))
                peer, peer_ranks = next((rank, ranks) for rank, ranks in arrivals if ranks != self._ranks)
                if self._rank == 0:  # it may hold the store, in which the others have yet to see this
                    time.sleep(2 * _LONGEST_LOOK_SECONDS)
                raise RankFailedError(
                    f"rank {self._rank} stops: it has WORLD_SIZE={self._ranks}, and rank {peer}, which came to the "
                    f"same MASTER_ADDR and MASTER_PORT, has WORLD_SIZE={peer_ranks}; set the same WORLD_SIZE on every "
                    "rank, and another MASTER_PORT for each job"
                )
            return store.add(agreeing_key, 0) >= self._ranks

        self._wait(all_arrived, missing)

    def _check_duplicate_rank(self) -> None:
        """Raise RankFailedError if another process of this machine, which still runs, came earlier as this rank."""
        if self._duplicate_key is None or not self._store.check([self._duplicate_key]):
            return
        earlier = Process(*json.loads(self._store.get(self._duplicate_key)))
        if earlier != Process.here() and earlier.state() == "running":
            raise RankFailedError(
                f"rank {self._rank} stops: process {earlier.pid} has RANK={self._rank}, too; set another RANK for each "
                "process"
            )
        self._duplicate_key = None

    def _wait(self, is_done: Callable[[], bool], missing: MissingRanks) -> None:
        look_seconds = _LOOK_SECONDS
        while not is_done():
            self._check_duplicate_rank()
            if missing.needs_update:
                missing.ranks = self.absent() or missing.ranks
            missing.check()
            time.sleep(look_seconds)
            look_seconds = min(1.5 * look_seconds, _LONGEST_LOOK_SECONDS)


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _describe_address(host: str, port: int) -> str:
    """Describe whether something listens at MASTER_ADDR and MASTER_PORT."""
    location = f"at {host}:{port} (MASTER_ADDR and MASTER_PORT)"
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except (socket.gaierror, UnicodeError) as error:
        return f"{location}: {host!r} does not resolve to an address ({error}); set MASTER_ADDR to rank 0's host"
    except OSError as error:
        return f"{location}, where nothing answers ({error}); set the same address and port on every rank"
    return f"{location}, where something listens that is not rank 0, or is too busy; set rank 0's port on every rank"
