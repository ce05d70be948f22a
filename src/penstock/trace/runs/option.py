"""What to record of a run: the argument `run_dir=` of `penstock.pipeline`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError, is_integer

WARM_STEPS = 5
"""The first step with a timeline: before it, whatever is made once is made."""
TIMELINE_EVERY = 50
"""Steps from one timeline to the next."""


@accept_old_names(timeline_every="trace_every", line="progress_bar", steps="total_steps")
@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run to record.

    Attributes:
        path: the folder, made if it is not there. A run that is in it is continued if the first step is not step 1,
            or else moved to earlier/.
        total_steps: how many steps there will be, so that the line in the terminal can say how much time is left.
        trace_every: record every rank's timeline in each step whose number divides by this, and in the fifth step,
            when all is warm; 0: never. Such a step takes a little longer.
        progress_bar: show a line with step, loss, speed, bubble and time left, if stderr is a terminal.

    Raises:
        ArgumentError: one of them is something else.
    """

    path: str | os.PathLike[str]
    total_steps: int | None = None
    trace_every: int = TIMELINE_EVERY
    progress_bar: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ArgumentError(f"run_dir={self.path!r}: expected a folder to record the run in, such as 'runs/gpt'")
        if not (self.total_steps is None or (is_integer(self.total_steps) and self.total_steps >= 1)):
            raise ArgumentError(
                f"RunConfig(total_steps={self.total_steps!r}): expected how many steps there will be, or None"
            )
        if not (is_integer(self.trace_every) and self.trace_every >= 0):
            raise ArgumentError(
                f"RunConfig(trace_every={self.trace_every!r}): expected an integer >= 1, or 0 for never"
            )
        if not isinstance(self.progress_bar, bool):
            raise ArgumentError(f"RunConfig(progress_bar={self.progress_bar!r}): expected True or False")

    @classmethod
    def of(cls, value: Any) -> RunConfig | None:
        """Convert the value of `run_dir=`, to a folder that no later `chdir` moves, as hydra does.

        Raise ArgumentError if it is neither a path, a RunConfig nor None, or if there is a file by that name.
        """
        if value is None:
            return None
        config = value if isinstance(value, RunConfig) else cls(value)
        if os.path.exists(config.path) and not os.path.isdir(config.path):
            raise ArgumentError(f"run_dir={os.fspath(config.path)!r} is a file; expected a folder to record the run in")
        return replace(config, path=Path(config.path).absolute())

    def times(self, step: int, since_start: int) -> bool:
        """Whether a step is recorded with its timeline.

        Args:
            step: its number, counted from 1.
            since_start: how many steps this process has run, this one included.
        """
        return self.trace_every > 0 and (since_start == WARM_STEPS or step % self.trace_every == 0)
