"""How a job ended: what its ranks and agents leave in one file, and the sentence that the launcher makes of it.

A rank notes what failed, wherever it learns of it; an agent notes how each rank's process ended. The first note names
the culprit, whose exit status is the job's. Ranks are silent about failures that the launcher will name.

If several ranks fail, each place names the first that it can know of: `FailureDetector.judge` the first that is gone;
`Control.fail` the failure of another rank that becomes known while its own error is in doubt, or else its own error;
`rank.main` the same outside a pipeline, by the notes; and the launcher the first note (`RankFailure.first`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT, parse_json, read_json, validate, write_json_line
from penstock._base.formatting import printable_line

FAILURES = "PENSTOCK_FAILURES"
"""In the environment of a job: the file in which `RankFailure`s are left. Whoever set it prints the first."""
_FOLDER = "folder"
_MAX_CHARACTERS = 500
_MAX_BYTES = 1 << 20
_INTERRUPTED = re.compile(r"^stopped by (Ctrl-C|SIG\w+)$|(^|: )KeyboardInterrupt(:|$)")
_CULPRIT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed, as reported by itself, another rank or its agent.

    Attributes:
        rank: of the whole job.
        exitcode: the exit status of its process, or -n for signal n; None: it has not ended yet.
        at_ns: when, on this machine's clock that only grows: to compare several processes.
        message: what failed, in one line; empty: only how its process ended is known.
    """

    __pydantic_config__: ClassVar = STRICT
    rank: int
    exitcode: int | None
    at_ns: int
    message: str = ""

    def __str__(self) -> str:
        return self.message or f"rank {self.rank} {describe_exit(self.exitcode or 0)}"

    @classmethod
    def first(cls, path: Path | str) -> Self | None:
        """Read what failed first from the file of `FAILURES`, with that rank's exit status; None if nothing did."""
        failures: list[Self] = []
        for line in _lines(path):
            with contextlib.suppress(ArgumentError):  # whatever a user's code wrote there
                failures.append(validate(cls, line, "failure"))
        failures.sort(key=lambda failure: failure.at_ns)
        if not failures or not failures[0].message:
            return failures[0] if failures else None
        codes = [failure.exitcode or 0 for failure in failures if failure.rank == failures[0].rank]
        return replace(failures[0], exitcode=max(1, *codes))  # a signal that came after the failure is the agent's

    def write(self, path: str) -> None:
        """Add it to such a file."""
        _add(path, asdict(self))


def note_failure(rank: int, message: str = "", exitcode: int | None = None) -> None:
    """Leave why a rank failed for the launcher, if there is one."""
    if path := os.environ.get(FAILURES):
        with contextlib.suppress(OSError):
            RankFailure(rank, exitcode, time.monotonic_ns(), printable_line(message, _MAX_CHARACTERS)).write(path)


def first_failure() -> RankFailure | None:
    """Return what failed first in this process's job, as far as is known; None too without a launcher."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return RankFailure.first(os.environ[FAILURES])
    return None


def await_culprit(rank: int) -> None:
    """Let the rank that failed first end first, if it is not this one: its traceback and its exit status count, and its
    agent then ends this process."""
    first = first_failure()
    if first is not None and first.rank != rank and first.message:
        time.sleep(_CULPRIT_SECONDS)


def register_run(folder: Path) -> None:
    """Have the launcher write its last message to the folder of a run, too."""
    if path := os.environ.get(FAILURES):
        with contextlib.suppress(OSError):
            _add(path, {_FOLDER: str(folder.resolve())})


def write_failure_to_runs(path: Path | str, message: str) -> None:
    """Write to the runs named by `register_run` why their ranks ended that failed or left their pipeline open."""
    folders = [entry[_FOLDER] for entry in _lines(path) if isinstance(entry.get(_FOLDER), str)]
    for folder in dict.fromkeys(folders):
        for file in Path(folder).glob("ranks/*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = read_json(file)
                if record["state"]["failure"] is not None or not record["state"]["ended"]:
                    record["state"]["failure"] = message
                    write_json_line(file, record)


def is_doubtful(error: BaseException) -> bool:
    """Whether an error may be the effect of another rank's end, as a wait for that rank raises it."""
    return isinstance(error, (RuntimeError, OSError))


def exit_status(error: BaseException) -> int:
    """Return the exit status of a program that this exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        code = error.code
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    return 1


def shell_status(exitcode: int) -> int:
    """Return a process's exit status as a shell reports it: 128 + n for signal n."""
    return 128 - exitcode if exitcode < 0 else exitcode


def describe_exit(exitcode: int) -> str:
    """Describe an exit: was killed by SIGKILL; ended with exit status 3."""
    names = {s.value: f"was killed by {s.name}" for s in signal.Signals}
    return names.get(-exitcode, f"ended with exit status {exitcode}")


def describe_signal(number: int) -> str:
    """Describe which signal ended a job."""
    return f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"


def was_interrupted(failure: str) -> bool:
    """Whether this message, of a rank or of `describe_signal`, means that the job was stopped and did not fail."""
    return _INTERRUPTED.search(failure) is not None


def _add(path: str, value: object) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(value).encode() + b"\n")


def _lines(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file to which ranks, and so the user's code, may write."""
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        for line in file.read(_MAX_BYTES).splitlines():
            with contextlib.suppress(ArgumentError):
                if isinstance(entry := parse_json(line, "failure"), dict):
                    yield entry
