"""The processes of a run, to look at and to kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from penstock.network import reaper


def processes(word: str) -> dict[int, dict[str, str]]:
    """The processes with a word in their command line, and their environments."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                found[int(folder.name)] = dict(line.split("=", 1) for line in lines if "=" in line)
        except OSError:
            continue  # ended meanwhile
    return found


def abandoned() -> list[str]:
    """The namespaces of emulations that were made since this process started, and whose makers have ended."""
    ours = reaper.start_ticks(os.getpid()) or 0
    names = reaper.list_namespaces()
    return [name for name in names if int(name.split("-")[2]) >= ours and not reaper.maker_lives(name)]


class Seen:
    """A watch that keeps what it is told, and does something after a trial."""

    def __init__(self, after: Callable[[int], None] = lambda number: None) -> None:
        self.trials: list[int] = []
        self._after = after

    def __call__(self, number: int) -> None:
        self.trials.append(number)
        self._after(number)


def kill_rank(rank: int, folder: Path, after: int) -> Callable[[int], None]:
    """Kills the process of a rank when a trial has ended; for `Seen`."""

    def kill(number: int) -> None:
        if number == after:
            (victim,) = [pid for pid, env in processes(str(folder)).items() if env.get("RANK") == str(rank)]
            os.kill(victim, signal.SIGKILL)

    return kill
