"""Starts a training job so that each rank records what it computes, and ends it after the requested steps.

Python imports a module `sitecustomize` when it starts, so one in PYTHONPATH reaches all ranks, whatever starts them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.distributed.launch.agent import kill_remaining
from penstock.distributed.launch.processes import QUIET, supervise
from penstock.distributed.launch.target import Target
from penstock.partition.given_model import as_module
from penstock.verification.blame.finding import Blame
from penstock.verification.blame.judge import judge
from penstock.verification.blame.names import read
from penstock.verification.blame.watch import FOLDER, STEPS

TIMEOUT_SECONDS = 300.0
_MODULES = {"torchrun": "torch.distributed.run", "penstock": "penstock"}
_START = """\
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

others = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
users = PathFinder.find_spec("sitecustomize", others)  # Python imports only one
if users is not None and users.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(users)
    users.loader.exec_module(sys.modules["sitecustomize"])
if sys.argv[:1] != ["-c"] or "--multiprocessing-fork" in sys.argv:  # no helper of multiprocessing, but a rank
    from penstock.verification.blame.pipelining import begin

    begin()
"""


class _EndError(Exception):
    """Ends the job; the argument is the reason, or empty if all steps were recorded."""


def blame(command: Sequence[str], spec: Target, steps: int, timeout: float = TIMEOUT_SECONDS) -> Blame:
    """Run a job and compare its steps with the unsplit model.

    Raises:
        ArgumentError: the job failed, and the steps before that are right; or what `run`, `read` and `judge` raise.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-blame-") as name:
        failure = run(command, Path(name), steps, timeout)
        job = read(Path(name), failure)
    result = judge(job, as_module(spec.model), spec)
    if result.ok and failure:
        raise ArgumentError(
            f"the job {failure} after {pluralize(result.steps, 'step')} in which nothing differs from the unsplit "
            "model: see what it printed, and where its ranks wait for each other"
        )
    return result


def run(command: Sequence[str], folder: Path, steps: int, timeout: float) -> str:
    """Run a job until all ranks have taken `steps` steps. Return how the job failed, or an empty string.

    Args:
        timeout: the seconds that a step may take, as may the start before the first.

    Raises:
        ArgumentError: it cannot be started.
        KeyboardInterrupt: a signal ended it, whose number is the argument.
    """
    last_change, files = time.monotonic(), 0

    def check() -> None:
        nonlocal last_change, files
        names = [file.name for file in folder.iterdir()]
        done = [name for name in names if name.startswith("done-")]
        worlds = [int(name.rpartition("-")[2]) for name in done]
        if worlds and worlds.count(max(worlds)) >= max(worlds):
            raise _EndError
        if len(names) != files:
            last_change, files = time.monotonic(), len(names)
        if time.monotonic() - last_change > timeout:
            raise _EndError(f"took no step for {timeout:g} s (--timeout)")

    argv = resolve_command(command)
    folder.joinpath("sitecustomize.py").write_text(_START)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**QUIET, **os.environ, "PYTHONPATH": path, FOLDER: str(folder), STEPS: str(steps)}
    try:
        with os.fdopen(os.dup(2), "wb") as printed:
            outcome = supervise([argv], environment, outputs=[printed], poll=check)
    except _EndError as end:
        return str(end)
    finally:
        kill_remaining(str(folder), FOLDER)
    if outcome.received:
        raise KeyboardInterrupt(outcome.received)
    return "failed" if outcome.status else ""


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the same command, with this Python's torchrun. Raise ArgumentError if it cannot be started."""
    name = command[0] if command else ""
    module = _MODULES.get(Path(name).name)
    if module is None and shutil.which(name) is None:
        raise ArgumentError(
            f"{f'{name}: no such command' if name else 'no command'}; expected one that starts ranks, as in `penstock "
            "blame reference.py -- torchrun --nproc-per-node 2 train.py`"
        )
    script = next((argument for argument in command if argument.endswith(".py") and " " not in argument), None)
    if module is not None and "-m" not in command and script is not None and not Path(script).is_file():
        raise ArgumentError(f"there is no file {script!r} in {Path.cwd()}; pass the path of the script that ranks run")
    return list(command) if module is None else [sys.executable, "-m", module, *command[1:]]
