"""A run at one moment, in a few metrics: as runs are watched, listed and compared."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.files import MAX_QUOTED
from penstock._base.formatting import one_line, printable_line
from penstock._base.process import is_alive
from penstock.distributed.launch.endings import describe_signal, was_interrupted
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import ABOUT, EARLIER
from penstock.trace.runs.progress import Progress
from penstock.trace.runs.reader import RecordedRun, is_run, read_run
from penstock.trace.runs.records import RankState, StepRecord

Health = Literal["computes", "waits", "between steps", "ended", "interrupted", "failed", "silent", "gone"]

SILENT_SECONDS = 5.0
"""A process writes its state several times in this interval."""


def health(
    state: RankState, now: float | None = None, host: str | None = None, is_there: Callable[[int], bool] = is_alive
) -> Health:
    """Return the health of a rank.

    `interrupted`: Ctrl-C ended it, or a signal to the launcher.
    `gone`: its process is not there any more, without having closed the pipeline; known of this host's processes only.
    `silent`: its state was not written for `SILENT_SECONDS`: gone, stopped, or out of reach.

    Args:
        now: in seconds since 1970.
        host: this one's name.
        is_there: whether a process of this host is there.
    """
    now = time.time() if now is None else now
    if state.failure is not None:
        return "interrupted" if was_interrupted(state.failure) else "failed"
    if state.ended:
        return "ended"
    is_local = bool(state.pid) and state.host == (socket.gethostname() if host is None else host)
    if is_local and not is_there(state.pid):
        return "gone"
    if now - state.written > SILENT_SECONDS:
        return "silent"
    if not state.action:
        return "between steps"
    return "waits" if state.waits_for else "computes"


_MAX_LISTED = 4
"""Ranks that are listed one by one."""


def failure_messages(ranks: Sequence[tuple[RankState, Health]]) -> list[str]:
    """Return one message per failed, dead or unresponsive rank, failures first."""
    messages = []
    for failure in dict.fromkeys(state.failure for state, _ in ranks if state.failure is not None):
        is_key = was_interrupted(failure) and "KeyboardInterrupt" in failure
        reason = describe_signal(signal.SIGINT) if is_key else failure
        messages.append(f"ended{_describe_step([state for state, _ in ranks if state.failure == failure])}: {reason}")
    for status, words in (("gone", "process exited without closing the pipeline"), ("silent", "silent")):
        if affected := [state for state, rank_health in ranks if rank_health == status]:
            messages += [
                f"rank {state.number}: {words}; last heard of{_describe_step([state], with_action=True)}"
                for state in affected[:_MAX_LISTED]
            ]
            if len(affected) > _MAX_LISTED:
                messages.append(f"and {len(affected) - _MAX_LISTED} more that are {status}")
    return messages


def _describe_step(states: Sequence[RankState], *, with_action: bool = False) -> str:
    """Describe the step that ranks had reached, if known; with `with_action`, also the first rank's action."""
    steps = [state.step for state in states if state.step is not None]
    action = f", in {states[0].action}" if with_action and states[0].action else ""
    return f" at step {max(steps):,}{action}" if steps else ""


State = Literal["training", "ended", "interrupted", "failed", "silent", "unknown"]

SETTINGS = (
    "model", "device", "schedule", "ranks", "replicas", "chunks", "microbatches", "rows", "processes", "cuts",
    "memory_limit", "verified", "torch", "penstock", "host",
)  # fmt: skip
"""The fields of `RunInfo` by which two runs may differ in what they compute, and on what."""


LAST_STEPS_BYTES = 64 << 10
"""How much of the end of a run's steps a list of runs and a live view read."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        path: its folder.
        about: what does not change.
        steps: those that were read, by number.
        progress: the last step, its loss, and the speed; None before the first step's end.
        ranks: what each does.
        damaged: a sentence for each rank whose state cannot be read.
        now: the moment, in seconds since 1970.
    """

    path: Path
    about: RunInfo
    steps: tuple[StepRecord, ...]
    progress: Progress | None
    ranks: tuple[tuple[RankState, Health], ...]
    damaged: tuple[str, ...]
    now: float

    @classmethod
    def of(cls, run: RecordedRun, most_bytes: int | None = LAST_STEPS_BYTES) -> RunSnapshot:
        """Read it. `most_bytes`: of its steps' file, read the end only, and so the last steps; None: all. Raise
        ArgumentError if a file is damaged in a way that leaves no answer."""
        (states, damaged), now = run.ranks_and_damage(), time.time()
        steps = run.steps(most_bytes)  # later, so that of a run that is over none is missing
        ranks = tuple((state, health(state, now)) for state in states)
        progress = Progress.of(steps, run.about.total_steps)
        return cls(run.path, run.about, tuple(steps), progress, ranks, tuple(damaged), now)

    @property
    def state(self) -> State:
        """The run's: "training" while a rank trains; "interrupted" if Ctrl-C or a signal ended it; "failed" if one
        raised or its process is gone; "silent" if none writes its state; "unknown" if none ever did."""
        statuses = {status for _, status in self.ranks}
        if not statuses:
            return "unknown"
        if "failed" not in statuses and "interrupted" in statuses:
            return "interrupted"
        if statuses & {"failed", "gone"}:
            return "failed"
        if statuses <= {"ended"}:
            return "ended"
        return "silent" if statuses <= {"silent", "ended"} else "training"

    @property
    def is_over(self) -> bool:
        """Whether every rank has finished."""
        over = ("ended", "interrupted", "gone", "failed")
        return bool(self.ranks) and all(status in over for _, status in self.ranks)

    @property
    def peak_bytes(self) -> int | None:
        """The most that a process has held so far; None if unknown."""
        return max((state.rss_bytes for state, _ in self.ranks if state.rss_bytes is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the path, the steps and the ranks."""
        settings = {name: getattr(self.about, name) for name in SETTINGS}
        progress = None if self.progress is None else self.progress.to_dict()
        return {
            "name": self.about.name, "started": self.about.started, "state": self.state,
            "settings": settings, "progress": progress, "peak_bytes": self.peak_bytes,
        }  # fmt: skip


def snapshot_or_error(folder: Path) -> RunSnapshot | str:
    """Read the run in a folder and its last steps, for a list of runs; or return one line on why it cannot be read: one
    damaged run does not hide the others."""
    try:
        return RunSnapshot.of(read_run(folder))
    except PenstockError as error:
        return str(error)
    except Exception as error:
        return f"run {str(folder)!r} cannot be read: {printable_line(one_line(error), MAX_QUOTED)}"


_MAX_DEPTH = 3


def list_runs(folder: Path) -> tuple[list[RunSnapshot], list[str]]:
    """Return the runs below a directory and the errors of corrupted ones. Raise ArgumentError if it does not exist."""
    if not folder.is_dir():
        raise ArgumentError(
            f"there is no folder {str(folder)!r}; penstock.pipeline(..., run_dir='{folder}/NAME') makes one"
        )
    runs = [
        snapshot_or_error(about.parent)
        for depth in range(_MAX_DEPTH + 1)
        for about in sorted(folder.glob("*/" * depth + ABOUT))
        if EARLIER not in about.relative_to(folder).parts and is_run(about.parent)
    ]
    return [run for run in runs if not isinstance(run, str)], [error for error in runs if isinstance(error, str)]


def differences(runs: Sequence[RunSnapshot]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, each with every run's value."""
    values_by_name = {name: [getattr(run.about, name) for run in runs] for name in SETTINGS}
    return {name: values for name, values in values_by_name.items() if any(value != values[0] for value in values)}


def common_steps(runs: Sequence[RunSnapshot]) -> list[int]:
    """Return up to eight steps that all runs have taken, evenly apart, the last one included."""
    common = sorted(set.intersection(*({record.step for record in run.steps} for run in runs)))
    stride = max(1, -(-len(common) // 8))
    return common[::-1][::stride][::-1]
