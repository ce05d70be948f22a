"""Forks the ranks of real pipelines, some of which raise, die or hang, from a process that has imported what they need.

A test runs a script (`answer_of`), which forks (`forked`): each rank ends as a process does, and leaves a log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scaffolding.warm_scripts import lines_of_script


class End(NamedTuple):
    """How a rank's process ended."""

    at_seconds: float
    """Of the clock `time.time`."""
    status: int
    """Its exit status; -9 if it was killed."""


def answer_of(script: Path, *arguments: str | Path) -> Any:
    """Runs a script that forks ranks, and returns the JSON value that it prints."""
    return json.loads("\n".join(lines_of_script(script, *arguments, seconds=150)))


def log_of(folder: Path, case: str, rank: int) -> Path:
    """Where a forked rank writes."""
    return folder / f"{case}.{rank}.log"


def forked(
    folder: Path,
    cases: Mapping[str, int],
    run: Callable[[str, int], None],
    seconds: float,
    over: Callable[[str, set[int]], bool] = lambda case, left: False,
) -> dict[str, dict[int, End]]:
    """Runs the ranks of all cases at the same time, since they mostly wait. Returns how each ended, by case and rank.

    Args:
        cases: the number of ranks of each.
        run: what a rank does, `run(case, rank)`.
        seconds: after these, all that are left are killed.
        over: `over(case, left)` says whether the ranks that are left in a case are to be killed already.
    """
    children: dict[int, tuple[str, int]] = {}
    for case, ranks in cases.items():
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _redirect(log_of(folder, case, rank))
                run(case, rank)
                sys.exit()  # the caller's `main` ends here in a rank
            children[pid] = case, rank
    ends: dict[str, dict[int, End]] = {case: {} for case in cases}
    deadline = time.monotonic() + seconds
    while children:
        for case in cases:
            pids = {rank: pid for pid, (of, rank) in children.items() if of == case}
            if time.monotonic() > deadline or over(case, set(pids)):
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
        for pid, (case, rank) in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                ends[case][rank] = End(time.time(), os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    return ends


def _redirect(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
