"""Runs the command `penstock` in this process, and reads what it prints; what became of processes of its own."""

from __future__ import annotations

import json
import os
import select
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli import app


def stay(deaf: int) -> str:
    """A script whose ranks tell their ids and those of processes that they start, and stay; SIGINT does not end `deaf`;
    told to die, rank 1 kills itself once rank 0 has told."""
    return f"""
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "{deaf}":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a rank that waits in gloo
helper = subprocess.Popen(["sleep", "600"])
os.write(1, f"{{os.getpid()}} {{helper.pid}}\\n".encode())
open(f"told.{{os.environ['RANK']}}", "w").close()
if "die" in sys.argv and os.environ["RANK"] == "1":
    while not os.path.exists("told.0"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def penstock(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments))


def output(*arguments: str, columns: int = 80) -> str:
    done = penstock(*arguments, columns=columns)
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*arguments: str) -> Any:
    """The one JSON value that is all of the output."""
    return json.loads(output(*arguments, "--json"), parse_constant=pytest.fail)


def refusal(*arguments: str) -> str:
    """The one line that says what is wrong, without its start."""
    done = penstock(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: error: ")
    return line.removeprefix("penstock: error: ")


def has_ended(pid: int, seconds: float = 30) -> bool:
    """Whether a process that is not our child ends in that time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
