"""torchrun's agent on this machine. Without it nothing would end this rank, and its store may be gone with it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from penstock._base.process import environments


class Launcher:
    """The process that started this one, if torchrun did.

    Ranks live on when their agent is killed, for lack of memory for example: nobody would restart them, learn how they
    end, or end them with the job.
    """

    def __init__(self) -> None:
        self._pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def gone(self) -> str | None:
        """What to say if it has ended, as this process's parent shows; None while it is there, or if there is none."""
        if self._pid is None or os.getppid() == self._pid:
            return None
        return f"its torchrun agent (process {self._pid}) is gone"

    def ended(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Of these global ranks, those that the agent started on this machine and of which no process is left.

        Found by their environment, on Linux; none elsewhere, or where this process does not show its own.
        """
        if self._pid is None or not Path("/proc/self/environ").exists():
            return ()
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        local = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        alive = {rank for rank in (_rank_in(given) for _, given in environments()) if rank is not None}
        return tuple(rank for rank in ranks if rank in local and rank not in alive) if alive else ()


def _rank_in(environment: list[bytes]) -> int | None:
    """The rank of a process of this job, by the environment that it was started with."""
    given = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    job = (b"TORCHELASTIC_RUN_ID", b"MASTER_PORT")
    if any(given.get(name) != os.environb.get(name) for name in job) or not given.get(b"RANK", b"").isdigit():
        return None
    return int(given[b"RANK"])
