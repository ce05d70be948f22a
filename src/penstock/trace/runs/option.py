"""What a run is asked to record: the argument `run=` of `penstock.pipeline`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError, is_integer

WARM_STEPS = 5
"""The first step with a timeline: before it, whatever is made once is made."""
TIMELINE_EVERY = 50
"""Steps from one timeline to the next."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run to record.

    Attributes:
        path: the folder, made if it is not there. A run that is in it is continued if the first step is not step 1,
            or else moved to earlier/.
        steps: how many steps there will be, so that the line in the terminal can say how much time is left.
        timeline_every: record every rank's timeline in each step whose number divides by this, and in the fifth step,
            when all is warm; 0: never. Such a step takes a little longer.
        line: show a line with step, loss, speed, bubble and time left, if stderr is a terminal.

    Raises:
        ArgumentError: one of them is something else.
    """

    path: str | os.PathLike[str]
    steps: int | None = None
    timeline_every: int = TIMELINE_EVERY
    line: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ArgumentError(f"run={self.path!r}: expected a folder to record the run in, such as 'runs/gpt'")
        if not (self.steps is None or (is_integer(self.steps) and self.steps >= 1)):
            raise ArgumentError(f"RunFolder(steps={self.steps!r}): expected how many steps there will be, or None")
        if not (is_integer(self.timeline_every) and self.timeline_every >= 0):
            raise ArgumentError(
                f"RunFolder(timeline_every={self.timeline_every!r}): expected an integer >= 1, or 0 for never"
            )
        if not isinstance(self.line, bool):
            raise ArgumentError(f"RunFolder(line={self.line!r}): expected True or False")

    @classmethod
    def of(cls, given: Any) -> RunFolder | None:
        """What `run=given` asks for, in a folder that no later `chdir` moves: hydra's jobs run in one of their own.

        Raises ArgumentError if it is neither a path, a RunFolder nor None, or if there is a file by that name.
        """
        if given is None:
            return None
        made = given if isinstance(given, RunFolder) else cls(given)
        if os.path.exists(made.path) and not os.path.isdir(made.path):
            raise ArgumentError(f"run={os.fspath(made.path)!r} is a file; expected a folder to record the run in")
        return replace(made, path=Path(made.path).absolute())

    def times(self, step: int, since_start: int) -> bool:
        """Whether a step is recorded with its timeline.

        Args:
            step: its number, counted from 1.
            since_start: how many steps this process has run, this one included.
        """
        return self.timeline_every > 0 and (since_start == WARM_STEPS or step % self.timeline_every == 0)
