"""Runs commands that start interpreters of their own, and tells where they stand if they do not end.

A loaded machine makes a start of seconds one of minutes, so only the stacks tell a slow command from one that is stuck.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TEST_SECONDS = 900
"""For `pytest.mark.timeout`, of tests that start several."""
COMMAND_SECONDS = 400
PENSTOCK = (sys.executable, "-c", "from penstock.cli import main; main()")


def finished(
    *command: str | Path, folder: Path, seconds: float = COMMAND_SECONDS, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a command, with one thread and `environment` besides this process's own, until it has ended.

    Fails the test if that takes more than `seconds`, with what the command said and where each of its threads stands.
    A variable that is None is not set.
    """
    return end_of(started(*command, folder=folder, **environment), seconds)


def started(*command: str | Path, folder: Path, **environment: str | None) -> subprocess.Popen[str]:
    """The same command, just started: its stacks go to stderr when it is aborted."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONFAULTHANDLER": "1"}
    given = {name: value for name, value in variables.items() if value is not None}
    return subprocess.Popen(
        [*map(str, command)], cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end_of(process: subprocess.Popen[str], seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    """What a started command says until it has ended. Fails the test as `finished` does."""
    try:
        printed, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        abort(process.pid)
        printed, said = process.communicate()
        pytest.fail(f"{process.args} did not end within {seconds} s.\n{printed}\n{said}")
    return subprocess.CompletedProcess(process.args, process.returncode, printed, said)


def abort(pid: int) -> None:
    """Aborts a process and all that it has started, the youngest first: one whose parent is gone may be told to end."""
    for one in (*reversed([*_descendants(pid)]), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGABRT)


def _descendants(pid: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(folder.name)
                yield from _descendants(int(folder.name))
