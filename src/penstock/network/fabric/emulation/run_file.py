"""run.json: what is known about a run from its first moment, and how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock._base.errors import FabricError
from penstock._base.files import write_json
from penstock.distributed.failure import name_ranks
from penstock.network.conditions import environment
from penstock.network.fabric.emulation import clock
from penstock.network.fabric.emulation.joining import Members, first_line, joined
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.samples import RUN


@contextmanager
def recorded(spec: Spec, folder: Path) -> Iterator[tuple[Members, Record]]:
    """Joins the other hosts, yields the members and the record, and records how the run ended. Raises ArgumentError:
    the environment is not torchrun's. Raises FabricError: a host did not join or was lost, or the block raised an
    error."""
    with joined(spec) as members:
        record: Record | None = None
        try:
            record = Record(spec, folder, members)
            yield members, record
            record.add(complete=True)
        except (RuntimeError, OSError) as error:
            text = cause(members, first_line(error))
            if record is not None:
                record.add(missing=text.removeprefix(f"host {members.rank}: "))
            raise FabricError(text) from None


def cause(members: Members, said: str) -> str:
    """Explains why the run ends, on a host that met an error: hosts that do not answer, or the first error on any host.

    Later errors are often just lost connections to the host that failed first.
    """
    own = f"host {members.rank}: {said}"
    first = members.first_error(own)
    silent = members.who_is_lost()
    if silent:
        does = "does" if len(silent) == 1 else "do"
        return f"host {members.rank}: {name_ranks(silent).replace('rank', 'host')} {does} not answer; {said}"
    return own if first.endswith(f": {said}") else first


class Record:
    """On host 0, the file, which is always complete JSON; on other hosts, nothing. Every host makes the same calls."""

    def __init__(self, spec: Spec, folder: Path, members: Members) -> None:
        hosts = told_apart(gathered(environment(), members))
        self._path = folder / RUN if members.rank == 0 else None
        self._found: dict[str, Any] = {
            "version": 1,
            **asdict(spec),
            "meets": spec.meets,
            "algorithms": [spec.algorithm_of(place) for place in range(len(spec.workload.transfers))],
            "environment": hosts,
            "machine_cores": os.cpu_count(),
            "shared_machine": clock.is_one(members.control),
            "complete": False,
            "missing": "",
        }
        if self._path is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.add()

    def add(self, **found: Any) -> None:
        """Adds entries to the record."""
        self._found.update(found)
        if self._path is not None:
            write_json(self._path, self._found)


def told_apart(hosts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Renames hosts that share their machine's name to their numbers, and keeps the name as `machine`."""
    names = [host["host"] for host in hosts]
    return [
        {**host, "host": name if names.count(name) == 1 else f"host {rank}", "machine": name}
        for rank, (host, name) in enumerate(zip(hosts, names, strict=True))
    ]


def gathered(mine: Any, members: Members) -> list[Any]:
    """Gathers a value from every host, on all hosts."""
    values: list[Any] = [None] * members.size
    dist.all_gather_object(values, mine, group=members.control)
    return values
