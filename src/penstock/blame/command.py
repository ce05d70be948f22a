"""Starts somebody's training job so that each rank notes what it computes, and ends it when that is enough."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.run import get_args_parser

from penstock.blame.data import Feed
from penstock.blame.finding import Blame
from penstock.blame.judge import judge
from penstock.blame.names import read
from penstock.blame.watch import FOLDER, STEPS
from penstock.errors import ArgumentError
from penstock.launch.processes import QUIET, supervise
from penstock.launch.target import Target
from penstock.partition.units.chain import as_module
from penstock.words import counted

RANK = "penstock.blame.rank"
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")


class _EnoughError(Exception):
    """All ranks have noted all steps."""


def blame(command: Sequence[str], given: Target, steps: int) -> Blame:
    """Runs a job and compares its steps with the unsplit model.

    Raises:
        ArgumentError: the job failed, and the steps before that are right; or what `run`, `read` and `judge` raise.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-blame-") as name:
        ended_well = run(command, Path(name), steps)
        noted = read(Path(name), ended_well=ended_well)
    found = judge(noted, as_module(given.model), Feed.of(given))
    if found.ok and not ended_well:
        taken = counted(found.steps, "step")
        raise ArgumentError(f"the job failed after {taken} that equal the unsplit model's: see what it printed")
    return found


def run(command: Sequence[str], folder: Path, steps: int) -> bool:
    """Runs it until all ranks have taken so many steps. Returns whether it ended well.

    Raises:
        ArgumentError: it is no command that starts ranks.
        KeyboardInterrupt: a signal ended it, whose number is the argument.
    """

    def look() -> None:
        worlds = [int(file.read_text() or 0) for file in folder.glob("rank-*")]
        if worlds and len([*folder.glob("done-*")]) >= max(worlds):
            raise _EnoughError

    environment = {**QUIET, **os.environ, FOLDER: str(folder), STEPS: str(steps)}
    try:
        with os.fdopen(os.dup(2), "wb") as printed:
            ended = supervise([watched(command)], environment, outputs=[printed], look=look)
    except _EnoughError:
        return True
    if ended.received:
        raise KeyboardInterrupt(ended.received)
    return ended.status == 0


def watched(command: Sequence[str]) -> list[str]:
    """The same command, whose ranks note what they compute. Raises ArgumentError: it does not start ranks."""
    name, rest = Path(command[0]).name if command else "", list(command[1:])
    if name.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1] in (*_TORCHRUN, "penstock"):
        name, rest = ("penstock" if rest[1] == "penstock" else "torchrun"), rest[2:]
    if name == "penstock" and rest[:1] == ["run"]:
        name, rest = "torchrun", _torchrun_of(rest[1:])
    if name != "torchrun":
        raise ArgumentError(
            f"{' '.join(command) or 'no command'}: expected a command that starts ranks: torchrun, "
            "python -m torch.distributed.run or penstock run, as in `penstock blame reference.py -- torchrun "
            "--nproc-per-node 2 train.py`"
        )
    parsed = get_args_parser().parse_args(rest)
    head = rest[: len(rest) - len(parsed.training_script_args) - 1]
    if parsed.module:
        head = [one for one in head if one not in ("-m", "--module")]
    program = [*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args]
    return [sys.executable, "-m", "torch.distributed.run", *head, "--module", RANK, *program]


def _torchrun_of(arguments: Sequence[str]) -> list[str]:
    """What `penstock run` with these arguments starts."""
    rest, ranks, module = list(arguments), "", list[str]()
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option in ("-m", "--module"):
            module = ["--module"]
        elif option in ("-n", "--ranks"):
            ranks = value or rest.pop(0)
        else:
            raise ArgumentError(f"penstock run {option}: expected --ranks and a script; omit {option}, or use torchrun")
    if not ranks:
        raise ArgumentError("penstock run: pass --ranks, which penstock blame needs")
    return ["--standalone", f"--nproc-per-node={ranks}", *module, *rest]
