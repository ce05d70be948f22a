"""How hosts find each other, the record of their run (run.json), and who is missing when it ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock._base.errors import ArgumentError, FabricError, RankFailedError
from penstock._base.files import write_json
from penstock.distributed.failure import name_ranks
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.joining import read_number, start
from penstock.network.conditions import environment
from penstock.network.fabric.emulation import clock
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.samples import RUN, RunRecord

_ANSWER_SECONDS = 3.0
"""How long hosts have to report that they are still there after one was lost."""


_START = "start every host with torchrun, or pass --hosts to make them here"


def read_torchrun_env() -> tuple[int, int]:
    """Return this host's rank, and the number of hosts, as torchrun has set them. Raise ArgumentError if it has not."""
    size = read_number("WORLD_SIZE", 1, remedy=_START)
    rank = read_number("RANK", 0, size - 1, _START)
    if not os.environ.get("MASTER_ADDR"):
        raise ArgumentError(f"the environment has no MASTER_ADDR: {_START}")
    read_number("MASTER_PORT", 1, 65535, _START)
    return rank, size


@dataclass(frozen=True, slots=True)
class Members:
    """The hosts of a run, as seen by this one.

    Attributes:
        rank, size: this host's number, and the number of hosts.
        store: a key-value store that all hosts share, apart from any process group.
        control: a gloo group of all hosts, for whatever is not part of a trial; None if the default group is one.
    """

    rank: int
    size: int
    store: Any
    control: dist.ProcessGroup | None


@contextmanager
def join(spec: Spec) -> Iterator[Members]:
    """Join the other hosts, as torchrun's environment says, and leave them at the end. Raise ArgumentError: the
    environment is not torchrun's, or the wrong number of hosts was started. Raise FabricError: a host does not join in
    time."""
    rank, size = read_torchrun_env()
    if size != spec.hosts:
        raise ArgumentError(
            f"{size} processes were started for {spec.hosts} hosts: start {spec.hosts}, or change --hosts"
        )
    try:
        timeouts = Timeouts(join_seconds=spec.join_seconds)
        store = start(spec.backend, timeouts, "penstock fabric", spec.stall_seconds)
        control = None if spec.backend == "gloo" else dist.new_group(backend="gloo")
    except RankFailedError as error:
        raise FabricError(str(error)) from None
    except (RuntimeError, OSError) as error:
        raise FabricError(
            f"host {rank}: all hosts are here, but {spec.backend} cannot connect them: {first_line(error)}. Does "
            "GLOO_SOCKET_IFNAME name the interface through which they reach each other?"
        ) from None
    try:
        yield Members(rank, size, store, control)
    finally:
        dist.destroy_process_group()


def first_line(error: BaseException) -> str:
    """Return an error's first line, without the source location and the advice that gloo adds."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^]]*\.(cc|h|cpp|hpp):\d+\] ", "", line).partition(". This is typically caused by")[0]


@contextmanager
def record_run(spec: Spec, folder: Path) -> Iterator[tuple[Members, RecordFile]]:
    """Join the other hosts, yield the members and the record, and record how the run ended. Raise ArgumentError: the
    environment is not torchrun's. Raise FabricError: a host did not join or was lost, or the block raised an error."""
    with join(spec) as members:
        record: RecordFile | None = None
        try:
            record = RecordFile(spec, folder, members)
            yield members, record
            record.add(complete=True)
        except (RuntimeError, OSError) as error:
            text = explain_failure(members, first_line(error))
            if record is not None:
                record.add(missing=text.removeprefix(f"host {members.rank}: "))
            raise FabricError(text) from None


def explain_failure(members: Members, message: str) -> str:
    """Explain why the run ends, on a host that met an error: hosts that do not answer, or the first error on any host.

    Later errors are often just lost connections to the host that failed first. Every host that met one calls this.
    """
    rank, store = members.rank, members.store
    first = own_message = f"host {rank}: {message}"
    deadline, silent = time.monotonic() + _ANSWER_SECONDS, list(range(members.size))
    try:
        first = bytes(store.compare_set("error", "", own_message)).decode()
        store.set(f"still/{rank}", "here")
        while silent := [other for other in silent if not store.check([f"still/{other}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except (RuntimeError, OSError):  # the store was on host 0, which is lost
        silent = [0] if rank else []
    if silent:
        does = "does" if len(silent) == 1 else "do"
        return f"host {rank}: {name_ranks(silent).replace('rank', 'host')} {does} not answer; {message}"
    return own_message if first.endswith(f": {message}") else first


class RecordFile:
    """On host 0, run.json, which is always complete; on other hosts, nothing. Every host makes the same calls."""

    def __init__(self, spec: Spec, folder: Path, members: Members) -> None:
        hosts: list[Any] = unique_host_names(gather(environment(), members))
        self._path = folder / RUN if members.rank == 0 else None
        self._record = RunRecord(
            **{field.name: getattr(spec, field.name) for field in fields(spec)},
            environment=tuple(hosts),
            machine_cores=os.cpu_count(),
            shared_machine=clock.is_shared(members.control),
        )
        if self._path is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.add()

    def add(self, **entries: Any) -> None:
        """Set entries of the record."""
        self._record = replace(self._record, **entries)
        if self._path is not None:
            write_json(self._path, asdict(self._record))


def unique_host_names(hosts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rename hosts that share their machine's name to their numbers, and keep the name as `machine`."""
    names = [host["host"] for host in hosts]
    return [
        {**host, "host": name if names.count(name) == 1 else f"host {rank}", "machine": name}
        for rank, (host, name) in enumerate(zip(hosts, names, strict=True))
    ]


def gather(value: Any, members: Members) -> list[Any]:
    """Gather a value from every host, on all hosts."""
    values: list[Any] = [None] * members.size
    dist.all_gather_object(values, value, group=members.control)
    return values


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait for messages that are under way."""
    for work in works:
        if work is not None:
            work.wait()
